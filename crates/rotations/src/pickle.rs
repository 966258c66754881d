//! A pickle interpreter that can build data and nothing else.
//!
//! A pickle is a program; Python's own loader runs whatever it names. This one knows the few opcodes that
//! `torch.save` writes for dictionaries of tensors, and six names it turns into plain values. Any other
//! opcode or name ends the reading with an error that says which. Values live in one flat arena and refer to
//! each other by index, so memo references, shared objects and even cycles need no recursion, and dropping
//! them is flat too.

mod value;

use std::collections::HashMap;

pub(crate) use value::{Element, PickleDocument, PickleValue, TensorStorage, TensorView, ValueId};

/// Most values one pickle may build; a file of 1024 layers needs about 50 000.
const VALUE_LIMIT: usize = 1 << 20;
/// Longest module or object name that is read.
const NAME_LIMIT: usize = 256;
/// Newest protocol whose opcodes are known.
const NEWEST_PROTOCOL: u8 = 5;

/// Why a pickle was not read.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs)]
#[non_exhaustive]
pub enum PickleError {
    #[error("the pickle ends in the middle of what it holds at byte {offset}")]
    Truncated { offset: usize },
    #[error("{extra} bytes follow the end of the pickle")]
    Trailing { extra: usize },
    #[error(
        "pickle protocol {protocol} is not supported; torch.save writes 2, up to {NEWEST_PROTOCOL} are read"
    )]
    Protocol { protocol: u8 },
    #[error("opcode 0x{opcode:02x} at byte {offset} has no place in a file of tensors")]
    Opcode { opcode: u8, offset: usize },
    #[error(
        "the pickle asks for {module:?} {name:?} (byte {offset}); only tensors and plain data are read, nothing \
         is imported or run"
    )]
    Global { module: String, name: String, offset: usize },
    #[error("the pickle is malformed at byte {offset}: {problem}")]
    Malformed { offset: usize, problem: &'static str },
    #[error("the pickle holds more than {limit} {what}")]
    TooLarge { what: &'static str, limit: usize },
}

/// Reads a pickle to its end.
pub(crate) fn parse(bytes: &[u8]) -> Result<PickleDocument, PickleError> {
    let mut machine = PickleInterpreter {
        bytes,
        at: 0,
        values: Vec::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
    };
    let root = machine.run()?;
    Ok(PickleDocument { values: machine.values, root })
}

struct PickleInterpreter<'a> {
    bytes: &'a [u8],
    at: usize,
    values: Vec<PickleValue>,
    stack: Vec<ValueId>,
    /// Heights of the stack at each open mark.
    marks: Vec<usize>,
    memo: HashMap<u32, ValueId>,
}

impl PickleInterpreter<'_> {
    fn run(&mut self) -> Result<ValueId, PickleError> {
        loop {
            let offset = self.at;
            let opcode = self.byte()?;
            match opcode {
                // PROTO
                0x80 => match self.byte()? {
                    protocol if protocol > NEWEST_PROTOCOL => return Err(PickleError::Protocol { protocol }),
                    _ => {}
                },
                // FRAME: only a hint to readers of streams.
                0x95 => drop(self.take(8)?),
                // STOP
                b'.' => return self.stop(),
                // MARK
                b'(' => self.marks.push(self.stack.len()),
                b'0' => drop(self.pop()?),
                b'1' => drop(self.pop_to_mark()?),
                b'N' => self.push(PickleValue::None)?,
                0x88 => self.push(PickleValue::Bool(true))?,
                0x89 => self.push(PickleValue::Bool(false))?,
                // BININT, BININT1, BININT2, LONG1
                b'J' => {
                    let value = i32::from_le_bytes(self.array()?);
                    self.push(PickleValue::Integer(value.into()))?
                }
                b'K' => {
                    let value = self.byte()?;
                    self.push(PickleValue::Integer(value.into()))?
                }
                b'M' => {
                    let value = u16::from_le_bytes(self.array()?);
                    self.push(PickleValue::Integer(value.into()))?
                }
                0x8a => {
                    let value = self.long()?;
                    self.push(PickleValue::Integer(value))?
                }
                b'G' => {
                    let value = f64::from_be_bytes(self.array()?);
                    self.push(PickleValue::Float(value))?
                }
                // SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
                0x8c => {
                    let length = usize::from(self.byte()?);
                    self.text(length)?
                }
                b'X' => {
                    let length = u32::from_le_bytes(self.array()?);
                    self.text(length as usize)?
                }
                0x8d => {
                    let length = u64::from_le_bytes(self.array()?);
                    self.text(usize::try_from(length).unwrap_or(usize::MAX))?
                }
                b')' => self.push(PickleValue::Tuple(Vec::new()))?,
                b't' => {
                    let items = self.pop_to_mark()?;
                    self.push(PickleValue::Tuple(items))?
                }
                // TUPLE1, TUPLE2, TUPLE3
                0x85..=0x87 => {
                    let items = self.pop_many(usize::from(opcode - 0x84))?;
                    self.push(PickleValue::Tuple(items))?
                }
                b']' => self.push(PickleValue::List(Vec::new()))?,
                b'a' => {
                    let item = self.pop()?;
                    self.extend_list(vec![item])?
                }
                b'e' => {
                    let items = self.pop_to_mark()?;
                    self.extend_list(items)?
                }
                b'}' => self.push(PickleValue::Dictionary(Vec::new()))?,
                b's' => {
                    let items = self.pop_many(2)?;
                    self.set_items(items)?
                }
                b'u' => {
                    let items = self.pop_to_mark()?;
                    self.set_items(items)?
                }
                // BINPUT, LONG_BINPUT, MEMOIZE
                b'q' => {
                    let index = self.byte()?;
                    self.remember(index.into())?
                }
                b'r' => {
                    let index = u32::from_le_bytes(self.array()?);
                    self.remember(index)?
                }
                0x94 => {
                    // At most one entry per byte of pickle, so the count fits.
                    let index = self.memo.len() as u32;
                    self.remember(index)?
                }
                // BINGET, LONG_BINGET
                b'h' => {
                    let index = self.byte()?;
                    self.recall(index.into())?
                }
                b'j' => {
                    let index = u32::from_le_bytes(self.array()?);
                    self.recall(index)?
                }
                b'c' => {
                    let module = self.line()?;
                    let name = self.line()?;
                    self.global(&module, &name, offset)?
                }
                // STACK_GLOBAL
                0x93 => self.stack_global(offset)?,
                b'Q' => self.persistent_id()?,
                b'R' => self.reduce()?,
                _ => return Err(PickleError::Opcode { opcode, offset }),
            }
        }
    }

    fn stop(&mut self) -> Result<ValueId, PickleError> {
        let root = self.pop()?;
        if !self.stack.is_empty() || !self.marks.is_empty() {
            return Err(self.malformed("values are left over"));
        }
        match self.bytes.len() - self.at {
            0 => Ok(root),
            extra => Err(PickleError::Trailing { extra }),
        }
    }

    fn malformed(&self, problem: &'static str) -> PickleError {
        PickleError::Malformed { offset: self.at, problem }
    }

    fn take(&mut self, length: usize) -> Result<&[u8], PickleError> {
        let end = self.at.checked_add(length).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or(PickleError::Truncated { offset: self.at })?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8, PickleError> {
        Ok(self.array::<1>()?[0])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], PickleError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    /// Little-endian two's complement of up to 8 bytes.
    fn long(&mut self) -> Result<i64, PickleError> {
        let length = usize::from(self.byte()?);
        if length > 8 {
            return Err(self.malformed("an integer of more than 64 bits"));
        }
        let bytes = self.take(length)?;
        let negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
        let mut wide = [if negative { 0xff } else { 0 }; 8];
        wide[..length].copy_from_slice(bytes);
        Ok(i64::from_le_bytes(wide))
    }

    fn text(&mut self, length: usize) -> Result<(), PickleError> {
        let text = std::str::from_utf8(self.take(length)?).map(str::to_owned);
        let text = text.map_err(|_| self.malformed("text that is not UTF-8"))?;
        self.push(PickleValue::Text(text))
    }

    /// A name up to the end of the line.
    fn line(&mut self) -> Result<String, PickleError> {
        let rest = &self.bytes[self.at..];
        let length = rest.iter().take(NAME_LIMIT + 1).position(|&byte| byte == b'\n');
        let Some(length) = length else {
            let problem =
                if rest.len() > NAME_LIMIT { "a name without an end" } else { "a name that is cut off" };
            return Err(self.malformed(problem));
        };
        let name = String::from_utf8_lossy(&rest[..length]).into_owned();
        self.at += length + 1;
        Ok(name)
    }

    fn push(&mut self, value: PickleValue) -> Result<(), PickleError> {
        if self.values.len() >= VALUE_LIMIT {
            return Err(PickleError::TooLarge { what: "values", limit: VALUE_LIMIT });
        }
        self.stack.push(ValueId(self.values.len() as u32));
        self.values.push(value);
        Ok(())
    }

    /// The top of the stack; what lies below an open mark cannot be reached.
    fn pop(&mut self) -> Result<ValueId, PickleError> {
        if self.stack.len() <= self.marks.last().copied().unwrap_or(0) {
            return Err(self.malformed("the stack is empty"));
        }
        self.stack.pop().ok_or(self.malformed("the stack is empty"))
    }

    fn pop_many(&mut self, count: usize) -> Result<Vec<ValueId>, PickleError> {
        let mut items = Vec::with_capacity(count);
        for _ in 0..count {
            items.push(self.pop()?);
        }
        items.reverse();
        Ok(items)
    }

    fn pop_to_mark(&mut self) -> Result<Vec<ValueId>, PickleError> {
        let height = self.marks.pop().ok_or(self.malformed("there is no mark"))?;
        Ok(self.stack.split_off(height))
    }

    fn top(&self) -> Result<ValueId, PickleError> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let top = self.stack.last().filter(|_| self.stack.len() > floor);
        top.copied().ok_or(self.malformed("the stack is empty"))
    }

    fn value(&self, id: ValueId) -> &PickleValue {
        &self.values[id.0 as usize]
    }

    fn extend_list(&mut self, items: Vec<ValueId>) -> Result<(), PickleError> {
        let target = self.top()?;
        let problem = self.malformed("items for something that is not a list");
        match &mut self.values[target.0 as usize] {
            PickleValue::List(list) => list.extend(items),
            _ => return Err(problem),
        }
        Ok(())
    }

    fn set_items(&mut self, items: Vec<ValueId>) -> Result<(), PickleError> {
        if !items.len().is_multiple_of(2) {
            return Err(self.malformed("a key without a value"));
        }
        let target = self.top()?;
        let problem = self.malformed("entries for something that is not a dictionary");
        match &mut self.values[target.0 as usize] {
            PickleValue::Dictionary(entries) => {
                entries.extend(items.chunks_exact(2).map(|pair| (pair[0], pair[1])))
            }
            _ => return Err(problem),
        }
        Ok(())
    }

    fn remember(&mut self, index: u32) -> Result<(), PickleError> {
        let value = self.top()?;
        self.memo.insert(index, value);
        Ok(())
    }

    fn recall(&mut self, index: u32) -> Result<(), PickleError> {
        let value = self.memo.get(&index).copied().ok_or(self.malformed("a reference to nothing"))?;
        self.stack.push(value);
        Ok(())
    }

    fn global(&mut self, module: &str, name: &str, offset: usize) -> Result<(), PickleError> {
        let value = match (module, name) {
            ("torch._utils", "_rebuild_tensor_v2") => PickleValue::RebuildTensor,
            ("collections", "OrderedDict") => PickleValue::OrderedDictionary,
            ("torch", "FloatStorage") => PickleValue::StorageType(Element::F32),
            ("torch", "DoubleStorage") => PickleValue::StorageType(Element::F64),
            ("torch", "HalfStorage") => PickleValue::StorageType(Element::F16),
            ("torch", "BFloat16Storage") => PickleValue::StorageType(Element::Bf16),
            _ => {
                let (module, name) = (module.to_owned(), name.to_owned());
                return Err(PickleError::Global { module, name, offset });
            }
        };
        self.push(value)
    }

    fn stack_global(&mut self, offset: usize) -> Result<(), PickleError> {
        let [module, name] = self.pop_array()?;
        match (self.value(module), self.value(name)) {
            (PickleValue::Text(module), PickleValue::Text(name))
                if module.len().max(name.len()) <= NAME_LIMIT =>
            {
                let (module, name) = (module.clone(), name.clone());
                self.global(&module, &name, offset)
            }
            _ => Err(self.malformed("a name that is not text")),
        }
    }

    fn pop_array<const N: usize>(&mut self) -> Result<[ValueId; N], PickleError> {
        let mut items = [ValueId(0); N];
        for item in items.iter_mut().rev() {
            *item = self.pop()?;
        }
        Ok(items)
    }

    /// The reference to a storage: `("storage", type, key, device, elements)`.
    fn persistent_id(&mut self) -> Result<(), PickleError> {
        let id = self.pop()?;
        let storage =
            self.storage(id).ok_or(self.malformed("a storage that is not described as torch does"))?;
        self.push(PickleValue::TensorStorage(storage))
    }

    fn storage(&self, id: ValueId) -> Option<TensorStorage> {
        let PickleValue::Tuple(items) = self.value(id) else { return None };
        let [kind, element, key, _device, elements] = items[..] else { return None };
        match (self.value(kind), self.value(element), self.value(key), self.value(elements)) {
            (
                PickleValue::Text(kind),
                PickleValue::StorageType(element),
                PickleValue::Text(key),
                PickleValue::Integer(elements),
            ) if kind == "storage" => {
                let elements = usize::try_from(*elements).ok()?;
                Some(TensorStorage { key: key.clone(), element: *element, elements })
            }
            _ => None,
        }
    }

    fn reduce(&mut self) -> Result<(), PickleError> {
        let [callable, arguments] = self.pop_array()?;
        let value = match (self.value(callable), self.value(arguments)) {
            (PickleValue::OrderedDictionary, PickleValue::Tuple(items)) if items.is_empty() => {
                PickleValue::Dictionary(Vec::new())
            }
            (PickleValue::RebuildTensor, PickleValue::Tuple(items)) => {
                let tensor = self.tensor(items);
                PickleValue::Tensor(
                    tensor.ok_or(self.malformed("a tensor that is not described as torch does"))?,
                )
            }
            _ => return Err(self.malformed("a call of something that is not a tensor")),
        };
        self.push(value)
    }

    /// `(storage, offset, shape, strides, requires_grad, hooks[, metadata])`; the view must lie in the
    /// storage.
    fn tensor(&self, items: &[ValueId]) -> Option<TensorView> {
        let [storage, offset, shape, strides, _, _, ..] = items else { return None };
        if items.len() > 7 {
            return None;
        }
        let PickleValue::TensorStorage(storage) = self.value(*storage) else { return None };
        let (shape, strides) = (self.sizes(*shape)?, self.sizes(*strides)?);
        let offset = self.size(*offset)?;
        if shape.len() != strides.len() {
            return None;
        }
        let mut last = offset;
        for (&size, &stride) in shape.iter().zip(&strides) {
            last = last.checked_add(size.checked_sub(1)?.checked_mul(stride)?)?;
        }
        (last < storage.elements).then(|| TensorView { storage: storage.clone(), offset, shape, strides })
    }

    fn sizes(&self, id: ValueId) -> Option<Vec<usize>> {
        match self.value(id) {
            PickleValue::Tuple(items) if items.len() <= 8 => {
                items.iter().map(|&item| self.size(item)).collect()
            }
            _ => None,
        }
    }

    fn size(&self, id: ValueId) -> Option<usize> {
        match self.value(id) {
            PickleValue::Integer(size) => usize::try_from(*size).ok(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
