use super::*;

const FORMATS: [&str; 7] = ["bf16", "fp8", "int4", "int2:scalar", "int2", "int2:widths=4/4/2/2", "high"];

fn bench() -> AttentionBench {
    AttentionBench {
        q_heads: 6,
        kv_heads: 2,
        head_dim: 64,
        groups: 1,
        contexts: vec![100, 300],
        formats: FORMATS.map(|name| name.parse().unwrap()).into(),
        threads: 2,
        pool_bytes: 1 << 20,
        repeat: 2,
        isa: Isa::detect(),
    }
}

#[test]
fn every_format_is_measured_and_right() {
    let mut rows = Vec::new();
    let slopes = run(&bench(), |row| rows.push(row.clone())).unwrap();
    let names: Vec<(&str, usize)> = rows.iter().map(|row| (row.kv, row.context)).collect();
    let expected = FORMATS.map(|kv| [(kv, 100), (kv, 300)]);
    assert_eq!(names, expected.concat());
    for row in &rows {
        assert!(row.pool_bytes >= 1 << 20 && row.us_per_layer > 0.0 && row.gb_per_s > 0.0, "{row:?}");
        assert!(row.error < 1e-3, "{row:?}");
        assert_eq!(row.kv == "bf16", row.times_bf16 == Some(1.0), "{row:?}");
    }
    assert_eq!(slopes.len(), FORMATS.len());
    assert_eq!(slopes[0].of_bf16, Some(1.0));
}

#[test]
fn every_path_can_be_measured() {
    for isa in Isa::available() {
        let bench = AttentionBench { isa, contexts: vec![64], pool_bytes: 1, ..bench() };
        run(&bench, |row| assert!(row.error < 1e-3 && row.path == isa.to_string(), "{row:?}")).unwrap();
    }
}

#[test]
fn slopes_are_those_of_a_line() {
    assert_eq!(slope(&[(1.0, 5.0), (2.0, 7.0), (4.0, 11.0)]), Some(2.0));
    assert_eq!(slope(&[(2.0, 5.0)]), Some(2.5));
    assert_eq!(slope(&[]), None);
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let refused = |change: &dyn Fn(&mut AttentionBench)| {
        let mut bench = bench();
        change(&mut bench);
        run(&bench, |_| {}).unwrap_err()
    };
    assert!(matches!(refused(&|bench| bench.kv_heads = 4), AttentionBenchError::Heads { .. }));
    assert!(matches!(refused(&|bench| bench.kv_heads = 0), AttentionBenchError::Heads { .. }));
    assert!(matches!(refused(&|bench| bench.head_dim = 63), AttentionBenchError::OddHead(63)));
    assert!(matches!(refused(&|bench| bench.groups = 5), AttentionBenchError::Codec(_)));
    assert!(matches!(refused(&|bench| bench.contexts = vec![1 << 50]), AttentionBenchError::TooLarge(_)));
}
