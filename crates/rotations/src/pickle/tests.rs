//! Pickles written by hand, harmless and not.

use super::*;

fn error(bytes: &[u8]) -> PickleError {
    parse(bytes).expect_err("must be refused")
}

#[test]
fn plain_data_is_built_with_memo_and_marks() {
    // pickle.dumps({"a": [1, -2, 300, 70000], "b": ("x", "x"), 3: None}, protocol=2)
    let bytes = b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01J\xfe\xff\xff\xffM\x2c\x01Jp\x11\x01\x00eX\x01\x00\x00\x00bq\x03X\x01\x00\x00\x00xq\x04h\x04\x86q\x05K\x03Nu.";
    let document = parse(bytes).expect("document");
    let PickleValue::Dictionary(entries) = document.root() else { panic!("not a dictionary") };
    assert_eq!(entries.len(), 3);
    let PickleValue::List(items) = document.get(entries[0].1) else { panic!("not a list") };
    let numbers: Vec<&PickleValue> = items.iter().map(|&item| document.get(item)).collect();
    assert_eq!(numbers, [1, -2, 300, 70000].map(PickleValue::Integer).iter().collect::<Vec<_>>());
    let PickleValue::Tuple(pair) = document.get(entries[1].1) else { panic!("not a tuple") };
    assert_eq!(pair[0], pair[1]);
    assert_eq!(document.get(entries[2].1), &PickleValue::None);
}

#[test]
fn newer_protocols_are_read() {
    // pickle.dumps({"a": -(1 << 40), "b": 0.5}, protocol=4)
    let bytes = b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94\x8a\x06\x00\x00\x00\x00\x00\xff\x8c\x01b\x94G?\xe0\x00\x00\x00\x00\x00\x00u.";
    let document = parse(bytes).expect("document");
    let PickleValue::Dictionary(entries) = document.root() else { panic!("not a dictionary") };
    assert_eq!(document.get(entries[0].1), &PickleValue::Integer(-(1 << 40)));
    assert_eq!(document.get(entries[1].1), &PickleValue::Float(0.5));
    assert_eq!(error(b"\x80\x06N."), PickleError::Protocol { protocol: 6 });
}

#[test]
fn calls_of_anything_else_are_refused_by_name() {
    let call = b"\x80\x02cos\nsystem\nq\x00X\x02\x00\x00\x00lsq\x01\x85q\x02Rq\x03.";
    assert!(
        matches!(error(call), PickleError::Global { module, name, offset: 2 } if module == "os" && name == "system")
    );
    let stacked = b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.";
    assert!(
        matches!(error(stacked), PickleError::Global { module, name, .. } if module == "builtins" && name == "eval")
    );
    // INST, OBJ, NEWOBJ, BUILD, EXT1 and PERSID could name classes as well.
    for opcode in [b'i', b'o', 0x81, b'b', 0x82, b'P'] {
        assert!(matches!(error(&[0x80, 2, opcode, b'.']), PickleError::Opcode { .. }), "{opcode}");
    }
}

#[test]
fn only_the_two_known_calls_work() {
    let dictionary = b"\x80\x02ccollections\nOrderedDict\n)R.";
    assert_eq!(parse(dictionary).expect("document").root(), &PickleValue::Dictionary(Vec::new()));
    for call in [
        &b"\x80\x02ccollections\nOrderedDict\nK\x01\x85R."[..],
        b"\x80\x02ctorch\nFloatStorage\n)R.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
        b"\x80\x02K\x01)R.",
        b"\x80\x02K\x01Q.",
    ] {
        assert!(matches!(error(call), PickleError::Malformed { .. }), "{call:?}");
    }
}

/// A tensor of 6 elements from offset 1 of a storage of 7.
fn tensor(offset: u8, shape: [u8; 2], strides: [u8; 2], elements: u8) -> Vec<u8> {
    let mut bytes = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK".to_vec();
    bytes.extend([elements, b't', b'Q', b'K', offset, b'K', shape[0], b'K', shape[1], 0x86]);
    bytes.extend([b'K', strides[0], b'K', strides[1], 0x86, 0x89, b'N', b't', b'R', b'.']);
    bytes
}

#[test]
fn views_outside_their_storage_are_refused() {
    let document = parse(&tensor(1, [2, 3], [1, 2], 7)).expect("view");
    let PickleValue::Tensor(view) = document.root() else { panic!("not a tensor") };
    assert_eq!((view.offset, &view.shape[..], &view.strides[..]), (1, &[2, 3][..], &[1, 2][..]));
    for bad in [tensor(2, [2, 3], [1, 2], 7), tensor(0, [2, 3], [3, 2], 7), tensor(0, [0, 3], [3, 1], 7)] {
        assert!(matches!(error(&bad), PickleError::Malformed { .. }));
    }
}

#[test]
fn damage_is_named() {
    assert_eq!(error(b""), PickleError::Truncated { offset: 0 });
    assert_eq!(error(b"\x80\x02X\xff\xff\xff\x7fab"), PickleError::Truncated { offset: 7 });
    assert_eq!(error(b"\x80\x02N.N"), PickleError::Trailing { extra: 1 });
    for bad in [
        &b"\x80\x02."[..],
        b"\x80\x02h\x07.",
        b"\x80\x02t.",
        b"\x80\x02NN.",
        b"\x80\x02(N.",
        b"\x80\x02N(0.",
        b"\x80\x02}(Nu.",
        b"\x80\x02Na.",
    ] {
        assert!(matches!(error(bad), PickleError::Malformed { .. }), "{bad:?}");
    }
    let long_name = [b"c".as_slice(), &[b'a'; 400]].concat();
    assert!(matches!(error(&long_name), PickleError::Malformed { problem: "a name without an end", .. }));
    let many = [b"]".as_slice(), &vec![b'N'; VALUE_LIMIT]].concat();
    assert!(matches!(error(&many), PickleError::TooLarge { .. }));
}

#[test]
fn a_list_that_holds_itself_ends() {
    let document = parse(b"\x80\x02]q\x00h\x00a.").expect("a cycle is only an index");
    let PickleValue::List(items) = document.root() else { panic!("not a list") };
    assert!(matches!(document.get(items[0]), PickleValue::List(_)));
}
