//! The scalar dequantisers against values read by another implementation (`tools/make_quant_fixtures.py`).

use std::path::Path;

use oscar_kernels::DType;
use oscar_kernels::quant::dequantise;

fn fixture(dtype: DType) -> (Vec<u8>, Vec<f32>) {
    let name = format!("{}.bin", dtype.to_string().to_lowercase());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    let file = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let word = |at: usize| u32::from_le_bytes(file.as_chunks::<4>().0[at]);
    let (bytes, elements) = (word(0) as usize, word(1) as usize);
    let data = file[8..8 + bytes].to_vec();
    let values: Vec<f32> =
        file[8 + bytes..].as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect();
    assert_eq!(values.len(), elements);
    (data, values)
}

#[test]
fn every_type_is_read_bit_for_bit_from_any_alignment() {
    for dtype in DType::ALL {
        let (data, expected) = fixture(dtype);
        for shift in 0..4 {
            let mut shifted = vec![0xa5; shift];
            shifted.extend_from_slice(&data);
            let mut out = vec![f32::NAN; expected.len()];
            dequantise(dtype, &shifted[shift..], &mut out);
            for (i, (got, want)) in out.iter().zip(&expected).enumerate() {
                assert_eq!(got.to_bits(), want.to_bits(), "{dtype} element {i}: {got} instead of {want}");
            }
        }
    }
}

#[test]
#[should_panic(expected = "Q4_K")]
fn a_wrong_length_is_refused() {
    dequantise(DType::Q4K, &[0; 143], &mut [0.0; 256]);
}
