//! One page out of result files: no script, no font, no picture from elsewhere.

use std::fmt::Write;

use super::escape::escape;
use super::results::{ResultRow, Results};
use super::sections::{KINDS, section};
use super::table::text;

const PAGE_STYLE: &str = "\
:root{color-scheme:light dark;--paper:#ffffff;--ink:#1c2430;--faint:#5d6878;--rule:#d9dee6;--band:#f4f6f9}\
@media (prefers-color-scheme:dark){:root{--paper:#12161d;--ink:#e6eaf0;--faint:#9aa6b5;--rule:#313a47;--band:#1a202a}\
figure svg{filter:invert(.93) hue-rotate(180deg)}}\
*{box-sizing:border-box}body{margin:0 auto;max-width:1080px;padding:16px;background:var(--paper);color:var(--ink);\
font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}\
h1{font-size:24px;margin:8px 0}h2{font-size:20px;margin:36px 0 4px;border-top:1px solid var(--rule);padding-top:20px}\
h3{font-size:16px;margin:20px 0 8px;overflow-wrap:anywhere}p{margin:4px 0}.faint{color:var(--faint);font-size:13px}\
nav a{margin-right:14px;color:inherit}ul{margin:4px 0;padding-left:20px}li{overflow-wrap:anywhere}\
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:16px;margin:12px 0}\
figure{margin:0;padding:8px;border:1px solid var(--rule);border-radius:8px;min-width:0}\
figure svg{display:block;width:100%;max-width:520px;height:auto;margin:0 auto}\
.wide{overflow-x:auto;margin:12px 0}table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}\
th,td{padding:4px 10px;text-align:left;border-bottom:1px solid var(--rule);white-space:nowrap}\
th{background:var(--band);font-weight:600}.number{text-align:right}tbody tr:hover{background:var(--band)}\
summary{cursor:pointer;margin:12px 0;color:var(--faint)}";

/// The page of all files.
pub fn page(title: &str, files: &[Results]) -> String {
    let rows: Vec<&ResultRow> = files.iter().flat_map(|file| &file.rows).collect();
    let kind_of = |row: &ResultRow| {
        // Benchmarks of the codec say what they are by what they measure.
        let implied = if row.contains_key("mb_per_s_per_core") { "codec" } else { "other" };
        text(row, "kind").unwrap_or_else(|| implied.to_owned())
    };
    let mut kinds: Vec<String> = KINDS.iter().map(|(kind, ..)| (*kind).to_owned()).collect();
    for row in &rows {
        let kind = kind_of(row);
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    kinds.retain(|kind| rows.iter().any(|row| kind_of(row) == *kind));

    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <title>{title}</title><style>{PAGE_STYLE}</style></head><body><h1>{title}</h1>",
        title = escape(title)
    );
    out += "<ul class=\"faint\">";
    for file in files {
        let _ = write!(
            out,
            "<li>{}: {} rows, measured on {}</li>",
            escape(&file.name),
            file.rows.len(),
            escape(&file.machine)
        );
    }
    out += "</ul>";
    if kinds.len() > 1 {
        out += "<nav>";
        for (index, kind) in kinds.iter().enumerate() {
            let _ = write!(out, "<a href=\"#kind-{index}\">{}</a>", escape(heading(kind).0));
        }
        out += "</nav>";
    }
    for (index, kind) in kinds.iter().enumerate() {
        let (name, note) = heading(kind);
        let _ = write!(out, "<section id=\"kind-{index}\"><h2>{}</h2>", escape(name));
        if !note.is_empty() {
            let _ = write!(out, "<p class=\"faint\">{}</p>", escape(note));
        }
        let kind_rows: Vec<&ResultRow> = rows.iter().copied().filter(|row| kind_of(row) == *kind).collect();
        let mut models: Vec<Option<String>> = Vec::new();
        for row in &kind_rows {
            let model = text(row, "model");
            if !models.contains(&model) {
                models.push(model);
            }
        }
        for model in models {
            if let Some(model) = &model {
                let _ = write!(out, "<h3>{}</h3>", escape(model));
            }
            let model_rows: Vec<&ResultRow> =
                kind_rows.iter().copied().filter(|row| text(row, "model") == model).collect();
            out += &section(kind, &model_rows);
        }
        out += "</section>";
    }
    if rows.is_empty() {
        out += "<p>The files have no rows.</p>";
    }
    out += "</body></html>\n";
    out
}

/// The heading of a kind, and a line that says how to read it.
fn heading(kind: &str) -> (&str, &str) {
    KINDS.iter().find(|(name, ..)| *name == kind).map_or((kind, ""), |(_, heading, note)| (heading, note))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;

    fn results(rows: Value) -> Results {
        let text = json!({"machine": {"cpu": "A <fast> CPU", "threads": 2}, "rows": rows}).to_string();
        Results::parse(Path::new("results.json"), text.as_bytes()).expect("results")
    }

    /// Tags that are opened and not closed, or closed and not opened.
    fn unbalanced(html: &str) -> Option<String> {
        let mut open: Vec<&str> = Vec::new();
        for part in html.split('<').skip(1) {
            let (tag, _) = part.split_once('>')?;
            let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap_or("");
            if tag.starts_with('/') {
                if open.pop() != Some(name) {
                    return Some(format!("</{name}> after {open:?}"));
                }
            } else if !tag.ends_with('/') && !["!DOCTYPE", "meta"].contains(&name) {
                open.push(name);
            }
        }
        (!open.is_empty()).then(|| format!("{open:?}"))
    }

    fn every_kind() -> Results {
        let mut rows = vec![
            json!({"kind": "kl", "model": "m1", "kv": "bf16", "kl": 0.0, "bits_per_element": 16.0}),
            json!({"kind": "kl", "model": "m1", "kv": "int2", "kl": 0.06, "bits_per_element": 2.25, "top1_agreement": 0.88}),
            json!({"kind": "kl", "model": "m1", "kv": "naive-int2", "kl": 1.4, "bits_per_element": 2.25}),
            json!({"kind": "kl", "model": "m2", "kv": "int4", "kl": 0.003, "bits_per_element": 4.25}),
            json!({"kind": "ablation", "model": "m1", "setting": "without H", "kl": 0.5}),
            json!({"kind": "ablation", "model": "m1", "setting": "all", "kl": 0.2}),
            json!({"kind": "speed of sound", "model": "m1", "value": 343}),
            json!({"no": "kind"}),
            json!({"stage": "encode", "path": "avx512", "mb_per_s_per_core": 400.0}),
            json!({"stage": "encode", "path": "scalar", "mb_per_s_per_core": 40.0}),
        ];
        for (kv, score) in [("int2", 0.5), ("bf16", 1.0)] {
            for (length, depth) in [(4096, 0), (4096, 100), (8192, 0), (8192, 100)] {
                rows.push(json!({"kind": "niah", "model": "m1", "kv": kv, "length": length, "depth": depth,
                                 "score": score, "prompts": 2, "task": "multi-key", "keys": 8}));
            }
        }
        results(Value::Array(rows))
    }

    #[test]
    fn a_page_is_whole_and_needs_nothing_else() {
        let html = page("Results & more", &[every_kind()]);
        assert_eq!(unbalanced(&html), None);
        for forbidden in ["<script", "<link", "<img", "@import", "url(", "src="] {
            assert!(!html.contains(forbidden), "{forbidden}");
        }
        assert!(html.contains("Results &amp; more") && html.contains("A &lt;fast&gt; CPU, 2 threads"));
        assert!(html.contains("width=device-width"));
    }

    #[test]
    fn every_kind_has_its_charts() {
        let html = page("t", &[every_kind()]);
        for part in [
            "KL by codec",
            "KL against size",
            "Found by length: multi-key, 8 keys",
            "int2: multi-key, 8 keys",
            "KL by setting",
            "encode, avx512\n",
            "\n400\n",
        ] {
            assert!(html.contains(part), "{part}");
        }
        assert!(html.contains("<th class=\"number\">4k, %</th>"), "the summary of needles");
        assert!(html.contains("speed of sound") && html.contains("343"));
        let kl = html.find("Distance from").expect("kl");
        assert!(kl < html.find("Needles in").expect("niah"), "kinds keep their order");
    }

    #[test]
    fn hostile_names_stay_text() {
        let evil = "</svg><script>alert(1)</script>\"'&";
        let rows = json!([
            {"kind": evil, "model": evil, evil: evil},
            {"kind": "kl", "model": evil, "kv": evil, "kl": 1.0, "bits_per_element": 2.0},
            {"kind": "kl", "model": evil, "kv": "b", "kl": 1e300, "bits_per_element": -5.0},
            {"kind": "niah", "model": evil, "kv": evil, "task": evil, "length": 1e9, "depth": 5, "score": 99},
            {"kind": "niah", "kv": null, "length": "x", "depth": [], "score": "y"},
            {"kind": "ablation", "setting": evil, "kl": -1.0}, {"kind": 7}, {}
        ]);
        let html = page(evil, &[results(rows)]);
        assert!(!html.contains("<script") && unbalanced(&html).is_none(), "{:?}", unbalanced(&html));
    }

    #[test]
    fn windows_tell_rows_of_one_codec_apart() {
        let rows = json!([
            {"kind": "kl", "kv": "int2", "kl": 0.2, "sink": 64, "recent": 256},
            {"kind": "kl", "kv": "int2", "kl": 1.2, "sink": 0, "recent": 0},
        ]);
        let html = page("t", &[results(rows)]);
        assert!(
            html.contains("int2, sink 64, recent 256\n") && html.contains("int2, sink 0, recent 0\n"),
            "{html}"
        );
    }

    #[test]
    fn cells_of_one_place_are_averaged_by_their_prompts() {
        let rows = json!([
            {"kind": "niah", "kv": "a", "length": 4096, "depth": 50, "score": 1.0, "prompts": 3},
            {"kind": "niah", "kv": "a", "length": 4096, "depth": 50, "score": 0.0, "prompts": 1},
        ]);
        let html = page("t", &[results(rows)]);
        assert!(html.contains(">\n75\n<"), "{html}");
    }

    #[test]
    fn no_rows_make_a_page_too() {
        assert!(page("t", &[results(json!([]))]).contains("no rows"));
        assert!(page("t", &[]).contains("</html>"));
    }
}
