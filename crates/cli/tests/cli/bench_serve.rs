//! `oscar bench serve`: a tiny model in its own process, a mock, and servers that are not there.

use crate::support::{Machine, fixture};

#[test]
fn a_model_is_served_and_measured() {
    let machine = Machine::new();
    let model = fixture("qwen3");
    let arguments = [
        "bench",
        "serve",
        model.to_str().expect("path"),
        "--requests",
        "12",
        "--output-tokens",
        "6",
        "--prefixes",
        "1",
        "--prefix-words",
        "15",
        "--own-words",
        "2",
        "--shared",
        "1",
    ];
    let json = machine.run([&arguments[..], &["--clients", "2", "--json"]].concat()).success().json();
    assert!(json["machine"]["cpu"].is_string());
    let row = &json["rows"][0];
    assert_eq!((row["requests"].as_u64(), row["failed"].as_u64()), (Some(12), Some(0)), "{row}");
    assert_eq!(row["output_tokens"], 6.0);
    // Every prompt begins with the same page, and all but the first find it.
    assert!(row["hit_rate"].as_f64().is_some_and(|rate| rate > 0.3 && rate < 1.0), "{row}");
    for number in ["ttft_ms_p50", "output_tokens_per_s", "goodput_per_s", "e2e_ms_p99"] {
        assert!(row[number].as_f64().is_some_and(|number| number > 0.0), "{number} of {row}");
    }
    let unlike = [&arguments[..arguments.len() - 1], &["0", "--rate", "50"]].concat();
    let table = machine.run(unlike).success().stdout;
    assert!(table.contains("poisson 50/s") && table.contains("goodput_per_s"), "{table}");
}

#[test]
fn a_server_is_measured_without_a_model() {
    let json = Machine::new().run(["bench", "serve", "--mock", "--json"]).success().json();
    let rows = json["rows"].as_array().expect("rows");
    assert_eq!((rows[0]["clients"].as_u64(), rows[1]["clients"].as_u64()), (Some(256), Some(64)));
    assert!(rows[0]["events_per_s"].as_f64().is_some_and(|speed| speed > 0.0), "{rows:?}");
    assert_eq!(rows[1]["tokens"].as_u64(), Some(64 * 4 * 100));
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let machine = Machine::new();
    machine.run(["bench", "serve", "--url", "http://127.0.0.1:1"]).failure(1, &["127.0.0.1:1", "--url"]);
    machine.run(["bench", "serve"]).failure(1, &["no server", "--mock"]);
    machine.run(["bench", "serve", "--url", "https://127.0.0.1"]).failure(1, &["only http"]);
    for arguments in [&["bench", "serve", "m", "--mock"][..], &["bench", "serve", "m", "--shared", "2"]] {
        assert_eq!(machine.run(arguments).code, Some(2), "{arguments:?}");
    }
}
