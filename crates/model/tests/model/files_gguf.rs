//! GGUF files: what an honest one gives, and how every lie is refused.

use std::path::Path;
use std::sync::Arc;

use crate::files_writer::{F32, GgufWriter, IQ2_XXS, Q8_0, array, string};
use oscar_kernels::DType;
use oscar_model::files::gguf::{MetadataArray, MetadataValue};
use oscar_model::files::{ElementType, FileError, Gguf, TensorSource};

fn parse(bytes: Vec<u8>) -> Result<Gguf, FileError> {
    Gguf::parse(Arc::new(bytes), Path::new("dir/m.gguf"))
}

/// The message of the error that `writer`'s file must give.
fn refusal(writer: &GgufWriter) -> String {
    parse(writer.build()).expect_err("the file lies").to_string()
}

/// A writer with one honest tensor, for lies about something else.
fn honest() -> GgufWriter {
    GgufWriter::new().str("general.architecture", "llama").zeros("w", &[4, 3])
}

#[test]
fn reads_metadata_of_every_type() {
    let nested = array(9, 2, &[array(4, 1, &7u32.to_le_bytes()), array(8, 1, &string("x"))].concat());
    let mut writer = GgufWriter::new()
        .raw("u8", 0, &[200])
        .raw("i8", 1, &[0xff])
        .raw("u16", 2, &60000u16.to_le_bytes())
        .raw("i16", 3, &(-5i16).to_le_bytes())
        .u32("u32", 4_000_000_000)
        .raw("i32", 5, &(-7i32).to_le_bytes())
        .f32("f32", 0.5)
        .bool("bool", true)
        .str("str", "héllo")
        .raw("u64", 10, &(1u64 << 40).to_le_bytes())
        .raw("i64", 11, &(-9i64).to_le_bytes())
        .raw("f64", 12, &0.25f64.to_le_bytes())
        .strings("strings", &["a", "", "ccc"])
        .f32s("f32s", &[1.0, -2.0])
        .i32s("i32s", &[1, -1])
        .raw("u16s", 9, &array(2, 2, &[1, 0, 2, 0]))
        .raw("bools", 9, &array(7, 2, &[1, 0]))
        .raw("empty", 9, &array(8, 0, &[]))
        .raw("nested", 9, &nested);
    for version in [2, 3] {
        writer.version = Some(version);
        let file = parse(writer.build()).unwrap();
        assert_eq!(file.version(), version);
        let metadata = file.metadata();
        assert_eq!(metadata.entries().len(), 19);
        assert_eq!(metadata.entries()[8].0, "str");
        assert_eq!(metadata.u32("u8").unwrap(), 200);
        assert_eq!(metadata.value("i8"), Some(&MetadataValue::I8(-1)));
        assert_eq!(metadata.u32("u16").unwrap(), 60000);
        assert_eq!(metadata.require::<i32>("i16").unwrap(), -5);
        assert_eq!(metadata.u32("u32").unwrap(), 4_000_000_000);
        assert_eq!(metadata.require::<i32>("i32").unwrap(), -7);
        assert_eq!(metadata.f32("f32").unwrap(), 0.5);
        assert!(metadata.bool("bool").unwrap());
        assert_eq!(metadata.str("str").unwrap(), "héllo");
        assert_eq!(metadata.u64("u64").unwrap(), 1 << 40);
        assert_eq!(metadata.value("i64"), Some(&MetadataValue::I64(-9)));
        assert_eq!(metadata.f32("f64").unwrap(), 0.25);
        assert_eq!(metadata.strings("strings").unwrap().iter().collect::<Vec<_>>(), ["a", "", "ccc"]);
        assert_eq!(metadata.strings("strings").unwrap().get(3), None);
        assert_eq!(metadata.f32s("f32s").unwrap(), [1.0, -2.0]);
        assert_eq!(&*metadata.i32s("i32s").unwrap(), [1, -1]);
        assert_eq!(&*metadata.i32s("u16s").unwrap(), [1, 2]);
        assert_eq!(
            metadata.value("bools"),
            Some(&MetadataValue::Array(MetadataArray::Bool(vec![true, false])))
        );
        assert!(metadata.strings("empty").unwrap().is_empty());
        let expected = MetadataArray::Arrays(vec![
            MetadataArray::U32(vec![7]),
            MetadataArray::Strings(["x"].into_iter().collect()),
        ]);
        assert_eq!(metadata.value("nested"), Some(&MetadataValue::Array(expected)));
        assert_eq!(metadata.get::<u32>("absent").unwrap(), None);
    }
}

#[test]
fn reads_tensors_where_they_lie() {
    let data: Vec<u8> = (0..24).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let blocks: Vec<u8> = (0..68).collect();
    for alignment in [8, 32, 4096] {
        let file = GgufWriter::new()
            .aligned(alignment)
            .tensor("vector", &[3], F32, data[..12].to_vec())
            .tensor("matrix", &[4, 6], F32, data.clone())
            .tensor("quantised", &[32, 2], Q8_0, blocks.clone())
            .tensor("cube", &[2, 2, 6], F32, data.clone());
        let file = parse(file.build()).unwrap();
        assert_eq!(file.names().collect::<Vec<_>>(), ["vector", "matrix", "quantised", "cube"]);
        assert!(file.tensors().iter().all(|tensor| tensor.offset.is_multiple_of(alignment as usize)));

        let matrix = file.tensor("matrix").unwrap();
        assert_eq!((&matrix.shape[..], matrix.dtype), (&[6, 4][..], DType::F32));
        let matrix = matrix.matrix().unwrap();
        assert_eq!((matrix.rows, matrix.cols, matrix.data().unwrap()), (6, 4, &data[..]));

        let vector = file.get("vector").unwrap();
        assert_eq!(vector.vector().unwrap().data().unwrap(), &data[..12]);
        assert_eq!((vector.matrix().unwrap().rows, vector.matrix().unwrap().cols), (1, 3));

        let quantised = file.find("quantised").unwrap().unwrap().matrix().unwrap();
        assert_eq!((quantised.dtype, quantised.data().unwrap()), (DType::Q8_0, &blocks[..]));

        let cube = file.tensor("cube").unwrap();
        assert_eq!(cube.shape, [6, 2, 2]);
        assert_eq!(
            cube.matrix().err().unwrap().to_string(),
            "dir/m.gguf: tensor `cube`: expected a matrix, its shape is [6, 2, 2]"
        );
        assert!(matches!(file.tensor("matrix").unwrap().vector(), Err(FileError::WrongShape { .. })));
    }
}

#[test]
fn summary_counts_types_and_bytes() {
    let file = GgufWriter::new()
        .zeros("a", &[4])
        .zeros("b", &[4, 4])
        .tensor("q", &[64], Q8_0, vec![0; 68])
        .tensor("i", &[256], IQ2_XXS, vec![0; 66]);
    let summary = parse(file.build()).unwrap().summary();
    let row = |name: &str| {
        let totals = &summary.types[name];
        (totals.tensors, totals.elements, totals.bytes, totals.supported)
    };
    assert_eq!(row("F32"), (2, 20, 80, true));
    assert_eq!(row("Q8_0"), (1, 64, 68, true));
    assert_eq!(row("IQ2_XXS"), (1, 256, 66, false));
    assert_eq!((summary.total.tensors, summary.total.bytes, summary.total.supported), (4, 214, false));
}

#[test]
fn maps_a_file_and_names_one_that_cannot_be_mapped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.gguf");
    std::fs::write(&path, honest().build()).unwrap();
    let tensor = Gguf::open(&path).unwrap().tensor("w").unwrap();
    // The mapping outlives the container.
    assert_eq!(tensor.matrix().unwrap().data().unwrap(), [0; 48]);

    let absent = folder.path().join("absent.gguf");
    let error = Gguf::open(&absent).unwrap_err();
    assert!(error.to_string().starts_with(&format!("{}: cannot read", absent.display())), "{error}");
    assert!(matches!(Gguf::open(folder.path()), Err(FileError::NotAFile { .. })));
    std::fs::write(&path, "").unwrap();
    assert!(matches!(Gguf::open(&path), Err(FileError::Truncated { expected: 4, actual: 0, .. })));
}

#[test]
fn every_known_type_id_has_its_block_size() {
    let supported = [0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 30, 39];
    let expected = [
        DType::F32,
        DType::F16,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q8_0,
        DType::Q4K,
        DType::Q5K,
        DType::Q6K,
        DType::BF16,
        DType::Mxfp4,
    ];
    for (id, dtype) in supported.into_iter().zip(expected) {
        let bytes = dtype.bytes_for(512).unwrap();
        let file = parse(GgufWriter::new().tensor("w", &[256, 2], id, vec![0; bytes]).build()).unwrap();
        assert_eq!(file.tensors()[0].element_type, ElementType::Supported(dtype));
        assert_eq!(file.tensor("w").unwrap().matrix().unwrap().data().unwrap().len(), bytes);
        // One byte less is too little, so the size is exact.
        let short = GgufWriter::new().tensor("w", &[256, 2], id, vec![0; bytes - 1]);
        assert!(refusal(&short).contains("truncated"));
    }
}

#[test]
fn unsupported_types_are_listed_but_not_given() {
    let file = GgufWriter::new().tensor("known", &[256], IQ2_XXS, vec![0; 66]).tensor(
        "unknown",
        &[5],
        999,
        vec![0; 5],
    );
    let file = parse(file.build()).unwrap();
    assert_eq!(file.tensors()[0].element_type.to_string(), "IQ2_XXS");
    assert_eq!(file.tensors()[1].byte_len, None);
    assert_eq!(
        file.tensor("known").unwrap_err().to_string(),
        "dir/m.gguf: tensor `known` has type IQ2_XXS, which oscar cannot read; supported: F32, F16, BF16, \
         Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4"
    );
    let error = file.tensor("unknown").unwrap_err().to_string();
    assert!(error.contains("tensor `unknown` has type unknown (999)"), "{error}");
}

#[test]
fn missing_tensor_and_key_are_named() {
    let file = parse(honest().build()).unwrap();
    assert_eq!(file.tensor("v").unwrap_err().to_string(), "dir/m.gguf: tensor `v` is missing");
    assert!(file.find("v").unwrap().is_none());
    assert!(!file.contains("v") && file.contains("w"));
    assert_eq!(
        file.metadata().u32("llama.x").unwrap_err().to_string(),
        "dir/m.gguf: key `llama.x` is missing"
    );
}

#[test]
fn wrong_metadata_types_name_the_key() {
    let file = GgufWriter::new()
        .str("s", "x")
        .raw("negative", 5, &(-1i32).to_le_bytes())
        .raw("large", 10, &u64::MAX.to_le_bytes())
        .u32("int", 1)
        .raw("u32s", 9, &array(4, 1, &u32::MAX.to_le_bytes()));
    let file = parse(file.build()).unwrap();
    let metadata = file.metadata();
    assert_eq!(
        metadata.u32("s").unwrap_err().to_string(),
        "dir/m.gguf: key `s`: expected a non-negative integer of 32 bits, found string"
    );
    assert_eq!(
        metadata.u32("negative").unwrap_err().to_string(),
        "dir/m.gguf: key `negative`: expected a non-negative integer of 32 bits, found i32 -1"
    );
    let wrong: [Result<(), FileError>; 9] = [
        metadata.u32("large").map(drop),
        metadata.u64("negative").map(drop),
        metadata.f32("int").map(drop),
        metadata.bool("int").map(drop),
        metadata.str("int").map(drop),
        metadata.strings("s").map(drop),
        metadata.f32s("s").map(drop),
        metadata.i32s("s").map(drop),
        metadata.i32s("u32s").map(drop),
    ];
    for result in wrong {
        assert!(matches!(result, Err(FileError::WrongType { .. })));
    }
}

#[test]
fn magic_is_checked() {
    let mut writer = honest();
    writer.magic = Some(*b"PK\x03\x04");
    assert_eq!(
        refusal(&writer),
        "dir/m.gguf: magic: expected `GGUF`, found `PK\\x03\\x04`; this is not a GGUF file"
    );
}

#[test]
fn version_is_checked() {
    for version in [0, 1, 4, 9999, u32::MAX] {
        let mut writer = honest();
        writer.version = Some(version);
        assert_eq!(
            refusal(&writer),
            format!("dir/m.gguf: version: {version} is not supported; supported: 2, 3")
        );
    }
}

#[test]
fn big_endian_files_are_recognised() {
    let mut writer = honest();
    writer.version = Some(3u32.swap_bytes());
    assert!(refusal(&writer).contains("the file is big-endian"));
}

#[test]
fn counts_are_bounded_by_the_file() {
    for count in [100, 1 << 20, u64::MAX] {
        let mut writer = honest();
        writer.tensor_count = Some(count);
        assert!(
            refusal(&writer).starts_with(&format!("dir/m.gguf: tensor count: {count} entries cannot fit"))
        );
        let mut writer = honest();
        writer.metadata_count = Some(count);
        assert!(
            refusal(&writer).starts_with(&format!("dir/m.gguf: metadata count: {count} entries cannot fit"))
        );
    }
}

#[test]
fn array_counts_are_bounded_by_the_file() {
    for element in [0, 4, 7, 8, 9, 12] {
        let message = refusal(&honest().raw("k", 9, &array(element, u64::MAX / 2, &[])));
        assert!(
            message.starts_with("dir/m.gguf: metadata key `k`: 9223372036854775807 entries"),
            "{message}"
        );
    }
}

#[test]
fn string_lengths_are_bounded_by_the_file() {
    for len in [1 << 20, u64::MAX - 2, u64::MAX] {
        let message = refusal(&honest().raw("k", 8, &len.to_le_bytes()));
        assert!(message.starts_with("dir/m.gguf: metadata key `k`: the file is truncated"), "{message}");
    }
}

#[test]
fn strings_must_be_utf8() {
    let message = refusal(&honest().raw("k", 8, &string(b"\xff")));
    assert!(message.starts_with("dir/m.gguf: metadata key `k`: a string is not valid UTF-8"), "{message}");
    let elements = [string(b"a"), string(b"\xc3")].concat();
    let message = refusal(&honest().raw("k", 9, &array(8, 2, &elements)));
    assert!(message.starts_with("dir/m.gguf: metadata key `k`: element 1: a string is not"), "{message}");
    let message = refusal(&honest().raw(b"\xff", 7, &[0]));
    assert!(message.starts_with("dir/m.gguf: metadata key 1: a string is not valid UTF-8"), "{message}");
    let message = refusal(&honest().last(|tensor| tensor.name = vec![0x80]));
    assert!(message.starts_with("dir/m.gguf: name of tensor 0: a string is not"), "{message}");
}

#[test]
fn value_types_are_checked() {
    assert_eq!(
        refusal(&honest().raw("k", 13, &[0; 8])),
        "dir/m.gguf: metadata key `k`: value type 13 is unknown"
    );
    assert_eq!(
        refusal(&honest().raw("k", 9, &array(77, 0, &[]))),
        "dir/m.gguf: metadata key `k`: value type 77 is unknown"
    );
    assert_eq!(
        refusal(&honest().raw("k", 7, &[2])),
        "dir/m.gguf: metadata key `k`: a bool is stored as 2, expected 0 or 1"
    );
    assert!(refusal(&honest().raw("k", 9, &array(7, 2, &[1, 3]))).contains("stored as 3"));
}

#[test]
fn nesting_is_limited() {
    let nest = |levels: usize| {
        let inner = array(0, 0, &[]);
        (1..levels).fold(inner, |value, _| array(9, 1, &value))
    };
    assert!(parse(honest().raw("k", 9, &nest(4)).build()).is_ok());
    assert_eq!(
        refusal(&honest().raw("k", 9, &nest(5))),
        "dir/m.gguf: metadata key `k`: arrays are nested deeper than 4 levels"
    );
    assert!(refusal(&honest().raw("k", 9, &nest(1_000))).contains("nested deeper"));
}

#[test]
fn duplicates_are_refused() {
    assert_eq!(refusal(&honest().u32("k", 1).u32("k", 1)), "dir/m.gguf: metadata key `k`: appears twice");
    assert_eq!(refusal(&honest().zeros("w", &[1])), "dir/m.gguf: tensor `w`: appears twice");
}

#[test]
fn alignment_must_be_a_power_of_two() {
    for alignment in [0, 3, 48] {
        assert_eq!(
            refusal(&honest().u32("general.alignment", alignment)),
            format!("dir/m.gguf: metadata key `general.alignment`: {alignment} is not a power of two")
        );
    }
    let message = refusal(&honest().str("general.alignment", "32"));
    assert!(message.contains("key `general.alignment`: expected a non-negative integer"), "{message}");
    // The data would start far behind the end.
    assert!(refusal(&honest().u32("general.alignment", 1 << 31)).contains("truncated"));
}

#[test]
fn dimensions_are_checked() {
    for count in [0, 5, u32::MAX] {
        assert_eq!(
            refusal(&honest().last(|tensor| tensor.dimension_count = Some(count))),
            format!("dir/m.gguf: tensor `w`: {count} dimensions, expected 1 to 4")
        );
    }
    assert_eq!(
        refusal(&honest().last(|tensor| tensor.dims = vec![4, 0])),
        "dir/m.gguf: tensor `w`: shape [4, 0] has no elements"
    );
    for dims in [[1 << 32, 1 << 32], [u64::MAX, 2], [1 << 62, 2], [1 << 62, 1]] {
        let message = refusal(&honest().last(|tensor| tensor.dims = dims.to_vec()));
        assert_eq!(message, format!("dir/m.gguf: tensor `w`: the size of shape {dims:?} overflows"));
    }
}

#[test]
fn rows_must_fill_blocks() {
    // 16 x 2 elements fill a block of 32 together, but no row does.
    assert_eq!(
        refusal(&GgufWriter::new().tensor("w", &[16, 2], Q8_0, vec![0; 34])),
        "dir/m.gguf: tensor `w`: rows of 16 elements do not fill blocks of 32, as type Q8_0 needs"
    );
}

#[test]
fn offsets_are_checked() {
    assert_eq!(
        refusal(&honest().last(|tensor| tensor.offset = Some(4))),
        "dir/m.gguf: tensor `w`: offset 4 is not a multiple of the alignment 32"
    );
    assert_eq!(
        refusal(&honest().last(|tensor| tensor.offset = Some(u64::MAX - 31))),
        format!("dir/m.gguf: tensor `w`: offset {} overflows", u64::MAX - 31)
    );
    assert!(refusal(&honest().last(|tensor| tensor.offset = Some(1 << 40))).contains("truncated"));
    let unknown = GgufWriter::new().tensor("w", &[1], 999, vec![0]).last(|tensor| tensor.offset = Some(32));
    assert!(refusal(&unknown).contains("truncated"));
}

#[test]
fn overlapping_tensors_are_refused() {
    let writer = GgufWriter::new().zeros("a", &[16]).zeros("b", &[16]);
    assert!(parse(writer.build()).is_ok());
    // The table need not be in the order of the data.
    let back_to_front = writer.clone().last(|tensor| tensor.offset = Some(32));
    assert_eq!(refusal(&back_to_front), "dir/m.gguf: tensors `a` and `b` overlap");
    let same = GgufWriter::new()
        .tensor("a", &[1], 999, vec![0])
        .tensor("b", &[1], 999, vec![0])
        .last(|tensor| tensor.offset = Some(0));
    assert!(refusal(&same).contains("overlap"));
}

#[test]
fn truncation_says_how_much_is_missing() {
    let whole = honest().build();
    let mut cut = whole.clone();
    cut.truncate(whole.len() - 5);
    assert_eq!(
        parse(cut).unwrap_err().to_string(),
        format!(
            "dir/m.gguf: tensor `w`: the file is truncated: expected at least {} bytes, it has {}",
            whole.len(),
            whole.len() - 5
        )
    );
}

#[test]
fn no_prefix_of_a_file_parses() {
    let whole = honest().strings("tokens", &["a", "b"]).build();
    for len in 0..whole.len() {
        assert!(parse(whole[..len].to_vec()).is_err(), "a prefix of {len} bytes was accepted");
    }
    assert!(parse(whole).is_ok());
}
