//! Every codec behind the common interface: sizes to the byte, errors in the order theory gives, nasty rows.

use crate::support::relative_error;
use oscar_codec::baselines::{self, KeyMeans, Kitty, Kivi, NAMES, TurboQuant};
use oscar_codec::{CacheCodec, CodecError, HeadIndex, Side, Windows};
use oscar_random::Random;

const HEAD: HeadIndex = HeadIndex { layer: 0, head: 0 };

fn codec(name: &str, dim: usize) -> Box<dyn CacheCodec> {
    baselines::by_name(name, dim, None).unwrap()
}

fn error_of(codec: &dyn CacheCodec, side: Side, rows: &[f32]) -> f64 {
    let mut back = rows.to_vec();
    codec.round_trip(HEAD, side, 0, &mut back).unwrap();
    relative_error(rows, &back)
}

#[test]
fn sizes_are_exact() {
    for (name, bytes_128, bytes_48) in [
        ("bf16", 512.0, 192.0),
        ("fp8", 260.0, 100.0),
        ("int4", 136.0, 56.0),
        ("saw-int4", 136.0, 56.0),
        ("int3", 104.0, 44.0),
        ("turboquant", 100.0, 40.0),
        // Keys: 2 bits and 4 bytes per 32 tokens and channel; values: 2 bits and 4 bytes per group.
        ("kivi2", 32.0 + 16.0 + 32.0 + 16.0, 12.0 + 6.0 + 12.0 + 8.0),
        // Keys per 128 tokens: mask, 2 bits, an eighth at 4 bits, 4 bytes per channel.
        (
            "kitty",
            (16.0 + 112.0 * 36.0 + 16.0 * 68.0) / 128.0 + 36.0,
            (6.0 + 42.0 * 36.0 + 6.0 * 68.0) / 128.0 + 16.0,
        ),
        ("quarot-int2", 72.0, 32.0),
        ("naive-int2", 72.0, 32.0),
    ] {
        let codec = codec(name, 128);
        assert_eq!(codec.name(), name);
        assert_eq!(codec.token_bytes(128), bytes_128, "{name}");
        assert_eq!(codec.token_bytes(48), bytes_48, "{name}");
        assert_eq!(codec.bits_per_element(128), bytes_128 / 32.0, "{name}");
    }
    assert_eq!(codec("int4", 128).bits_per_element(128), 4.25);
    assert_eq!(codec("kivi2", 128).bits_per_element(128), 3.0);
    let bits = Windows::default().lab_bits_per_element(codec("quarot-int2", 128).as_ref(), 128, 128 << 10);
    assert!((bits - 2.284).abs() < 5e-4);
}

#[test]
fn names_are_complete_and_strangers_are_refused() {
    for name in NAMES {
        assert_eq!(codec(name, 64).name(), name);
    }
    let error = baselines::by_name("int5", 64, None).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("kivi2"), "{error}");
    let means = || KeyMeans::new(1, vec![vec![0.0; 64]]).unwrap();
    assert!(baselines::by_name("kivi2", 64, Some(means())).is_err());
    assert_eq!(baselines::by_name("int4", 64, Some(means())).unwrap().name(), "int4+centred");
    assert!(baselines::by_name("int4", 128, Some(means())).is_err());
    for name in NAMES {
        assert!(baselines::by_name(name, 0, None).is_err(), "{name}");
        assert!(baselines::by_name(name, usize::MAX, None).is_err(), "{name}");
    }
    assert!(KeyMeans::new(2, vec![vec![0.0; 64]]).is_err());
    assert!(KeyMeans::new(1, vec![vec![f32::NAN; 64]]).is_err());
}

/// Relative squared error on Gaussian rows, against what each quantiser's theory says.
#[test]
fn errors_on_gaussian_rows_are_what_theory_says() {
    let rows = Random::new(1).normal_vec(1024 * 128);
    for (name, low, high) in [
        ("bf16", 0.0, 4e-6),
        ("fp8", 2e-4, 1e-3),
        // Uniform quantiser of a range of 2·2.7 σ in 15 and 7 steps: step²/12.
        ("int4", 0.008, 0.014),
        ("saw-int4", 0.008, 0.014),
        ("int3", 0.04, 0.06),
        // Eight-level Lloyd–Max: 0.03454.
        ("turboquant", 0.0335, 0.0360),
        ("quarot-int2", 0.240, 0.260),
        ("naive-int2", 0.240, 0.260),
    ] {
        for side in [Side::Key, Side::Value] {
            let error = error_of(codec(name, 128).as_ref(), side, &rows);
            assert!((low..=high).contains(&error), "{name} {side:?}: {error}");
        }
    }
    // Groups of 32: a smaller range, a smaller error, on both sides.
    let kivi = codec("kivi2", 128);
    for side in [Side::Key, Side::Value] {
        let error = error_of(kivi.as_ref(), side, &rows);
        assert!((0.14..0.18).contains(&error), "kivi2 {side:?}: {error}");
    }
    // Kitty's keys: one range over 128 tokens, an eighth of the channels at four bits.
    let kitty = codec("kitty", 128);
    let keys = error_of(kitty.as_ref(), Side::Key, &rows);
    assert!((0.20..0.24).contains(&keys), "kitty keys: {keys}");
    let values = error_of(kitty.as_ref(), Side::Value, &rows);
    assert!((0.24..0.26).contains(&values), "kitty values: {values}");
}

/// Each idea must help where its authors say it helps.
#[test]
fn each_idea_pays_on_its_own_kind_of_data() {
    let mut random = Random::new(2);
    // Loud fixed channels, as in keys.
    let loud: Vec<f32> =
        (0..512 * 64).map(|i| random.normal() as f32 * if i % 64 < 4 { 30.0 } else { 1.0 }).collect();
    let quiet_error = |codec: &dyn CacheCodec| {
        let mut back = loud.clone();
        codec.round_trip(HEAD, Side::Key, 0, &mut back).unwrap();
        let pairs = loud.iter().zip(&back).enumerate().filter(|(i, _)| i % 64 >= 4);
        pairs.map(|(_, (a, b))| f64::from(a - b).powi(2)).sum::<f64>() / (512.0 * 60.0)
    };
    let naive = quiet_error(codec("naive-int2", 64).as_ref());
    let kivi = quiet_error(codec("kivi2", 64).as_ref());
    assert!(kivi < 0.2 && naive > 0.9, "per-channel keys: {kivi} against {naive}");
    let total = |name: &str| error_of(codec(name, 64).as_ref(), Side::Key, &loud);
    assert!(total("kitty") < 0.3 * total("kivi2"), "promotion: {} {}", total("kitty"), total("kivi2"));

    // A single spike per row: a Hadamard over all channels spreads it, blocks of 16 less so.
    let spikes: Vec<f32> = (0..512 * 64)
        .map(|i| random.normal() as f32 + if i % 64 == (i / 64) % 64 { 40.0 } else { 0.0 })
        .collect();
    let spiked = |name: &str| error_of(codec(name, 64).as_ref(), Side::Key, &spikes);
    assert!(spiked("int4") < spiked("saw-int4"), "{} {}", spiked("int4"), spiked("saw-int4"));
    assert!(spiked("int4") < 0.25 * spiked("int3") && spiked("int3") < 0.5 * spiked("quarot-int2"));
}

#[test]
fn centred_keys_survive_a_huge_constant() {
    let mut random = Random::new(3);
    let mean: Vec<f32> = random.normal_vec(64).iter().map(|x| 100.0 * x).collect();
    let rows: Vec<f32> = (0..128 * 64).map(|i| mean[i % 64] + random.normal() as f32).collect();
    let means = KeyMeans::new(2, vec![vec![0.0; 64], mean]).unwrap();
    let centred = baselines::by_name("int4", 64, Some(means)).unwrap();
    let head = HeadIndex { layer: 0, head: 1 };
    let error = |codec: &dyn CacheCodec, side| {
        let mut back = rows.clone();
        codec.round_trip(head, side, 0, &mut back).unwrap();
        rows.iter().zip(&back).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>() / rows.len() as f64
    };
    assert!(error(centred.as_ref(), Side::Key) < 0.02);
    assert!(error(codec("int4", 64).as_ref(), Side::Key) > 10.0);
    // Values are never centred by key means.
    assert!(error(centred.as_ref(), Side::Value) > 10.0);
    let mut one = vec![0.0; 64];
    let outside = centred.round_trip(HeadIndex { layer: 1, head: 0 }, Side::Key, 0, &mut one);
    assert!(matches!(outside, Err(CodecError::UnknownHead { .. })));
}

#[test]
fn nasty_rows_are_safe_everywhere() {
    type Shape = (&'static str, fn(usize) -> f32);
    let shapes: [Shape; 7] = [
        ("zeros", |_| 0.0),
        ("constant", |_| 5.5),
        ("beyond f16", |i| if i % 2 == 0 { 1e7 } else { -1e7 }),
        ("huge", |i| if i == 5 { 1e37 } else { 0.0 }),
        ("denormal", |i| f32::from_bits(i as u32)),
        ("tiny", |i| i as f32 * 1e-12),
        ("offset", |i| 20_000.0 + i as f32 / 1e3),
    ];
    for dim in [48, 64, 96] {
        for name in NAMES {
            let codec = codec(name, dim);
            for (shape, value) in shapes {
                for side in [Side::Key, Side::Value] {
                    let mut rows: Vec<f32> = (0..128 * dim).map(|i| value(i % dim)).collect();
                    codec.round_trip(HEAD, side, 0, &mut rows).unwrap();
                    assert!(rows.iter().all(|x| x.is_finite()), "{name} d={dim} {shape} {side:?}");
                    if shape == "zeros" {
                        assert!(rows.iter().all(|x| x.abs() < 1e-5), "{name} {side:?}");
                    }
                    if shape == "constant"
                        && !matches!(name, "turboquant" | "quarot-int2" | "int3" | "int4" | "saw-int4")
                    {
                        assert!(rows.iter().all(|x| (x - 5.5).abs() < 0.02), "{name} {side:?} {}", rows[0]);
                    }
                }
            }
        }
    }
}

#[test]
fn not_a_number_is_named_and_nothing_changes() {
    for name in NAMES {
        let codec = codec(name, 64);
        for side in [Side::Key, Side::Value] {
            let mut rows = Random::new(4).normal_vec(256 * 64);
            rows[200 * 64 + 33] = f32::INFINITY;
            let before = rows.clone();
            let error = codec.round_trip(HEAD, side, 0, &mut rows).unwrap_err();
            assert_eq!(error, CodecError::NotFinite { row: 200, channel: 33 }, "{name} {side:?}");
            assert_eq!(rows, before, "{name}");
            assert!(codec.round_trip(HEAD, side, 0, &mut rows[..63]).is_err(), "{name}");
        }
    }
}

#[test]
fn keys_come_in_whole_token_groups() {
    for (codec, group) in [
        (Box::new(Kivi::new(64).unwrap()) as Box<dyn CacheCodec>, 32),
        (Box::new(Kitty::new(64).unwrap()), 128),
    ] {
        assert_eq!(codec.token_group(), group);
        let mut rows = Random::new(5).normal_vec((group + 1) * 64);
        assert!(codec.round_trip(HEAD, Side::Key, 0, &mut rows).is_err());
        assert!(codec.round_trip(HEAD, Side::Value, 0, &mut rows).is_ok());
        // Groups are independent: the second half encodes the same with or without the first.
        let mut both = Random::new(6).normal_vec(2 * group * 64);
        let mut second = both[group * 64..].to_vec();
        codec.round_trip(HEAD, Side::Key, 0, &mut both).unwrap();
        codec.round_trip(HEAD, Side::Key, 0, &mut second).unwrap();
        assert_eq!(both[group * 64..], second);
    }
}

#[test]
fn turboquant_is_seeded_and_keeps_directions() {
    let rows = Random::new(7).normal_vec(64 * 64);
    let read = |seed| {
        let mut back = rows.clone();
        TurboQuant::new(64, seed).unwrap().round_trip(HEAD, Side::Key, 0, &mut back).unwrap();
        back
    };
    assert_eq!(read(1), read(1));
    assert_ne!(read(1), read(2));
    // One loud channel is no different from any other direction.
    let mut spike = vec![0.0; 64];
    spike[7] = 100.0;
    let exact = spike.clone();
    TurboQuant::new(64, 1).unwrap().round_trip(HEAD, Side::Key, 0, &mut spike).unwrap();
    assert!(relative_error(&exact, &spike) < 0.08);
}
