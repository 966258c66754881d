//! `oscar bench codec` and `oscar bench attention`.

use crate::support::Machine;

#[test]
fn the_codec_is_measured_on_every_path() {
    let machine = Machine::new();
    let arguments = ["bench", "codec", "--head-dim", "32", "--rule", "clip=0.96", "--rows", "80"];
    let json = machine.run([&arguments[..], &["--json"]].concat()).success().json();
    assert!(json["machine"]["cpu"].is_string());
    let rows = json["rows"].as_array().expect("rows");
    for stage in ["encode", "rotate", "quantise"] {
        let scalar = rows.iter().find(|row| row["stage"] == stage && row["path"] == "scalar");
        assert_eq!(scalar.expect(stage)["times_scalar"], 1.0);
    }
    for row in rows {
        assert_eq!(row["equal"], true, "{row}");
        assert!(row["mb_per_s_per_core"].as_f64().is_some_and(|speed| speed > 0.0), "{row}");
    }
    let table = machine.run([&arguments[..], &["--groups", "2"]].concat()).success().stdout;
    assert!(table.contains("mb_per_s_per_core") && table.contains("clip=0.96"), "{table}");
}

#[test]
fn what_the_codec_cannot_do_is_refused() {
    let machine = Machine::new();
    let outcome = machine.run(["bench", "codec", "--head-dim", "64", "--groups", "5"]);
    outcome.failure(1, &["5 groups", "64 channels"]);
    for (option, value, word) in [
        ("--rule", "lloyd", "clip=RATIO"),
        ("--rule", "clip=2", "clip=RATIO"),
        ("--head-dim", "0", "1..=1024"),
        ("--head-dim", "99999999", "1..=1024"),
        ("--rows", "-1", "-1"),
        ("--threads", "0", "1..=1024"),
    ] {
        let outcome = machine.run(["bench", "codec", option, value]);
        assert_eq!(outcome.code, Some(2), "{outcome:?}");
        assert!(outcome.stderr.contains(word), "{}", outcome.stderr);
    }
    assert!(machine.run(["bench", "codec", "--help"]).success().stdout.contains("Examples:"));
}

#[test]
fn attention_is_measured_in_every_format() {
    let machine = Machine::new();
    let small =
        ["--q-heads", "4", "--kv-heads", "2", "--head-dim", "32", "--contexts", "128,1k", "--pool-mb", "1"];
    let arguments = [&["bench", "attention"][..], &small].concat();
    let json = machine.run([&arguments[..], &["--threads", "2", "--json"]].concat()).success().json();
    assert!(json["machine"]["cpu"].is_string());
    let rows = json["rows"].as_array().expect("rows");
    for kv in ["bf16", "fp8", "int4", "int2"] {
        for context in [128, 1024] {
            let row = rows.iter().find(|row| row["kv"] == kv && row["context"] == context).expect(kv);
            for number in ["us_per_layer", "gb_per_s", "read_gb_per_s", "read_share", "times_bf16"] {
                assert!(row[number].as_f64().is_some_and(|number| number > 0.0), "{number} of {row}");
            }
            assert!(row["error"].as_f64().is_some_and(|error| error < 1e-3), "{row}");
        }
        let slope = rows.iter().find(|row| row["kind"] == "slope" && row["kv"] == kv).expect(kv);
        assert!(slope["us_per_1k_tokens"].is_f64() && slope["of_bf16"].is_f64(), "{slope}");
    }
    let table = machine.run([&arguments[..], &["--kv", "int2"]].concat()).success().stdout;
    assert!(table.contains("read_share") && table.contains("us_per_1k_tokens"), "{table}");
}

#[test]
fn attention_that_cannot_be_measured_is_refused() {
    let machine = Machine::new();
    let outcome = machine.run(["bench", "attention", "--q-heads", "5", "--kv-heads", "2"]);
    outcome.failure(1, &["5 query heads", "2 KV heads"]);
    machine.run(["bench", "attention", "--groups", "5"]).failure(1, &["5 groups"]);
    for (option, value, word) in [
        ("--kv", "int3", "int4"),
        ("--contexts", "k", "k"),
        ("--contexts", "0", "0"),
        ("--head-dim", "0", "1..=1024"),
        ("--pool-mb", "0", "1..="),
        ("--threads", "0", "1..=1024"),
    ] {
        let outcome = machine.run(["bench", "attention", option, value]);
        assert_eq!(outcome.code, Some(2), "{outcome:?}");
        assert!(outcome.stderr.contains(word), "{}", outcome.stderr);
    }
    assert!(machine.run(["bench", "attention", "--help"]).success().stdout.contains("Examples:"));
}
