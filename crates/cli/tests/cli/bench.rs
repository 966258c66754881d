//! `oscar bench codec`.

use crate::support::Machine;

#[test]
fn the_codec_is_measured_on_every_path() {
    let machine = Machine::new();
    let arguments = ["bench", "codec", "--head-dim", "32", "--rule", "clip=0.96", "--rows", "80"];
    let json = machine.run([&arguments[..], &["--json"]].concat()).success().json();
    assert!(json["machine"]["cpu"].is_string());
    let rows = json["rows"].as_array().expect("rows");
    for stage in ["encode", "rotate", "quantise", "decode"] {
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
