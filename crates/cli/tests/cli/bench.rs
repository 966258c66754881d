//! `oscar bench codec`, `attention`, `engine` and slices in `oscar bench model`.

use serde_json::Value;

use crate::support::{Machine, patient_model};

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
    assert!(rows.iter().any(|row| row["kv"] == "int2") && rows.iter().any(|row| row["kv"] == "int2:scalar"));
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

#[test]
fn encoders_of_one_type_take_turns_in_an_engine() {
    let machine = Machine::new();
    let model = patient_model(&machine);
    let arguments =
        ["bench", "engine", model.to_str().expect("path"), "--contexts", "1k", "--gen-tokens", "4"];
    let shared = ["--requests", "2", "--prefix-tokens", "64", "--suffix-tokens", "8", "--output-tokens", "4"];
    let caches = ["--kv", "bf16,int2:scalar,int2", "--repeat", "2", "--interval-ms", "0", "--json"];
    let outcome = machine.run([&arguments[..], &shared, &caches].concat()).success();
    let json = outcome.json();
    let rows = json["rows"].as_array().expect("rows");
    let (long, prefixes): (Vec<&Value>, Vec<&Value>) =
        rows.iter().partition(|row| !row["kv_bytes"].is_null());
    let names: Vec<&str> = long.iter().filter_map(|row| row["kv"].as_str()).collect();
    assert_eq!(names, ["bf16", "int2:scalar", "int2"]);
    assert!(prefixes.iter().any(|row| row["kv"] == "int2:scalar"), "{prefixes:?}");
    // At 16 channels bands need 17 bytes for a key and a value, scalar codes 24, which are padded to 32 channels: so both
    // encoders were at work. Of 16 pages 6 are windows.
    let bytes =
        |row: &Value| row["kv_bytes"].as_f64().expect("bytes") / long[0]["kv_bytes"].as_f64().expect("bytes");
    let share = |token: f64| (6.0 + 10.0 * token / 64.0) / 16.0;
    assert!((bytes(long[1]) - share(24.0)).abs() < 1e-9, "{long:?}");
    assert!((bytes(long[2]) - share(17.0)).abs() < 1e-9, "{long:?}");
    assert!(long.iter().all(|row| row["ratio"].as_f64().is_some_and(|ratio| ratio > 0.0)), "{long:?}");
    for bad in ["int4:scalar", "int2:best"] {
        let outcome = machine.run([&arguments[..3], &["--kv", bad]].concat());
        assert_eq!(outcome.code, Some(2), "{outcome:?}");
        assert!(outcome.stderr.contains("int2:band, int2:scalar and int2:paper"), "{}", outcome.stderr);
    }
}

#[test]
fn a_slice_of_a_model_is_measured_by_itself() {
    let machine = Machine::new();
    let small = ["--prompt-tokens", "8", "--gen-tokens", "2", "--context", "1024", "--repeat", "1"];
    let slice =
        ["bench", "model", "--random-weights", "qwen3-0.6b", "--shard", "3/8", "--card-memory", "1GB"];
    let arguments = [&slice[..], &small].concat();
    let json = machine.run([&arguments[..], &["--json"]].concat()).success().json();
    let row = &json["rows"][0];
    assert_eq!(
        (&row["shard"], &row["cards"], &row["all_reduces"]),
        (&"3/8".into(), &8.into(), &"left out".into())
    );
    let number = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("{name} in {row}"));
    assert!(number("step_ms") > 0.0);
    // 28 layers, one head of 128 channels: 14336 bytes of a token in bf16; in sequences of 16 pages 6 are windows.
    let (bf16, int2) = (14_336.0, 2016.0);
    let density = 16.0 * bf16 / (6.0 * bf16 + 10.0 * int2);
    assert!((number("int2_over_bf16") - density).abs() < 1e-9, "{row}");
    let room = 1e9 - number("slice_weight_bytes");
    assert!((number("cards_bf16_tokens") - room / bf16).abs() <= 1.0, "{row}");
    assert!((number("cards_int2_tokens") - room / bf16 * density).abs() <= 1.0, "{row}");
    // Norms alone are on every card.
    let repeated = 8.0 * number("slice_weight_bytes") - number("model_weight_bytes");
    assert_eq!(repeated, 7.0 * 4.0 * (28.0 * (2.0 * 1024.0 + 2.0 * 128.0) + 1024.0));
    let text = machine.run(&arguments).success().stdout;
    for words in [
        "slice 3/8: 2 of 16 query heads, 1 of 8 KV heads, 384 of 3072 dense columns",
        "left out: the all-reduces",
        "8 cards of 1.00 GB hold",
        "tokens per GB, int2 over bf16: 2.16",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn slices_that_there_are_not_are_refused() {
    let machine = Machine::new();
    let run =
        |shard: &str| machine.run(["bench", "model", "--random-weights", "qwen3-0.6b", "--shard", shard]);
    run("0/3").failure(1, &["qwen3-0.6b", "16 query heads", "3 cards"]);
    run("0/32").failure(1, &["16 query heads", "32 cards"]);
    for (shard, word) in [("8/8", "counted from 0"), ("eight", "0/8")] {
        let outcome = run(shard);
        assert_eq!(outcome.code, Some(2), "{outcome:?}");
        assert!(outcome.stderr.contains(word), "{}", outcome.stderr);
    }
    let files = machine.run(["bench", "model", "./model.gguf", "--shard", "0/8"]);
    assert_eq!(files.code, Some(2), "{files:?}");
    assert!(files.stderr.contains("cannot be used with"), "{}", files.stderr);
}
