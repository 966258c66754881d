//! The paper charts are drawn on.

use std::fmt::Write;

/// Width of every chart in its own units; pages scale it.
pub(super) const WIDTH: f64 = 460.0;
/// Space above the drawing for the title.
pub(super) const TITLE_HEIGHT: f64 = 30.0;

/// Colours and letters of all charts, for light and dark. A page holds it once; a chart in a file of its own
/// brings it along.
pub const STYLE: &str = "\
.chart{--paper:#ffffff;--ink:#1c2430;--faint:#5d6878;--rule:#d9dee6;--heat:#1565a8;\
--c0:#2166ac;--c1:#d95f02;--c2:#1b8a5a;--c3:#a6328c;--c4:#8a6d00;--c5:#5e4fa2;--c6:#c2185b;--c7:#4d6570}\
@media (prefers-color-scheme:dark){.chart{--paper:#12161d;--ink:#e6eaf0;--faint:#9aa6b5;--rule:#313a47;\
--heat:#2f83cf;--c0:#6cb2f2;--c1:#ff9d4d;--c2:#4fcf95;--c3:#e58ad2;--c4:#dcbf3f;--c5:#b1a3ff;--c6:#ff7eab;\
--c7:#a9bcc6}}\
.chart text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;font-size:12px;fill:var(--ink)}\
.chart .title{font-size:14px;font-weight:600}.chart .faint{fill:var(--faint);font-size:11px}\
.chart .end{text-anchor:end}.chart .middle{text-anchor:middle}.chart .rule{stroke:var(--rule);stroke-width:1}\
.chart .paper{fill:var(--paper)}.chart .heat{fill:var(--heat)}.chart .frame{fill:none;stroke:var(--rule)}\
.chart .on{fill:#ffffff}.chart .line{fill:none;stroke-width:2}.chart .gap{fill:none;stroke:var(--rule)}";

/// Colours for series before they repeat.
const COLOURS: usize = 8;

/// Text that is safe between tags and inside quotes. Control characters, which XML forbids, become a mark.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' | '\r' => out.push(' '),
            control if control.is_control() || matches!(control, '\u{fffe}' | '\u{ffff}') => {
                out.push('\u{fffd}')
            }
            plain => out.push(plain),
        }
    }
    out
}

/// The colour of the series at `index`.
pub(super) fn colour(index: usize) -> String {
    format!("var(--c{})", index % COLOURS)
}

/// About how wide a text is at 12 units; system letters differ, so this is on the generous side.
pub(super) fn text_width(text: &str) -> f64 {
    text.chars().map(|letter| if letter.is_ascii() { 6.7 } else { 9.0 }).sum()
}

/// A label cut to a width, with a mark where letters are left out.
pub(super) fn fitted(text: &str, width: f64) -> String {
    if text_width(text) <= width {
        return text.to_owned();
    }
    let mut out = String::new();
    for letter in text.chars() {
        if text_width(&out) + 16.0 > width {
            break;
        }
        out.push(letter);
    }
    out.push('…');
    out
}

/// A drawing under construction.
#[derive(Debug, Default)]
pub(super) struct Canvas {
    body: String,
}

impl Canvas {
    pub(super) fn new() -> Canvas {
        Canvas::default()
    }

    /// A text; `class` holds names of [`STYLE`].
    pub(super) fn text(&mut self, x: f64, y: f64, class: &str, text: &str) {
        let _ = write!(self.body, r#"<text x="{x:.1}" y="{y:.1}" class="{class}">{}</text>"#, escape(text));
    }

    /// A text that climbs, for the name of an upright axis.
    pub(super) fn upright_text(&mut self, x: f64, y: f64, class: &str, text: &str) {
        let _ = write!(
            self.body,
            r#"<text x="{x:.1}" y="{y:.1}" class="{class}" transform="rotate(-90 {x:.1} {y:.1})">{}</text>"#,
            escape(text)
        );
    }

    pub(super) fn line(&mut self, x1: f64, y1: f64, x2: f64, y2: f64) {
        let _ =
            write!(self.body, r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" class="rule"/>"#);
    }

    /// A rectangle with attributes such as `class="heat"` and what it says when pointed at.
    pub(super) fn rectangle(&mut self, corner: (f64, f64), size: (f64, f64), attributes: &str, says: &str) {
        let ((x, y), (width, height)) = (corner, size);
        let _ = write!(
            self.body,
            r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" {attributes}><title>{}</title></rect>"#,
            escape(says)
        );
    }

    pub(super) fn polyline(&mut self, points: &[(f64, f64)], colour: &str) {
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = write!(
            self.body,
            r#"<polyline points="{}" class="line" style="stroke:{colour}"/>"#,
            points.join(" ")
        );
    }

    pub(super) fn dot(&mut self, x: f64, y: f64, colour: &str, says: &str) {
        let _ = write!(
            self.body,
            r#"<circle cx="{x:.1}" cy="{y:.1}" r="4" style="fill:{colour}"><title>{}</title></circle>"#,
            escape(says)
        );
    }

    /// The whole drawing. `alone` brings the style and a ground, for a file of its own.
    pub(super) fn finish(self, title: &str, height: f64, alone: bool) -> String {
        let style = if alone {
            format!("<style>{STYLE}</style><rect width=\"100%\" height=\"100%\" class=\"paper\"/>")
        } else {
            String::new()
        };
        format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" aria-label="{}" viewBox="0 0 {WIDTH:.0} {height:.0}">{style}{}</svg>"#,
            escape(title),
            self.body
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_leave_its_place() {
        assert_eq!(
            escape("<script>\"a\" & 'b'</script>"),
            "&lt;script&gt;&quot;a&quot; &amp; &#39;b&#39;&lt;/script&gt;"
        );
        assert_eq!(escape("a\nb\u{1b}[0m\u{0}"), "a b\u{fffd}[0m\u{fffd}");
        assert_eq!(escape("schön 日本"), "schön 日本");
    }

    #[test]
    fn long_labels_are_cut() {
        assert_eq!(fitted("short", 100.0), "short");
        let cut = fitted("a very long label that does not fit", 80.0);
        assert!(cut.ends_with('…') && text_width(&cut) <= 80.0, "{cut}");
        assert_eq!(fitted("anything", 1.0), "…");
    }

    #[test]
    fn a_chart_alone_brings_its_style() {
        assert!(Canvas::new().finish("t", 10.0, true).contains("prefers-color-scheme:dark"));
        assert!(!Canvas::new().finish("t", 10.0, false).contains("<style>"));
    }
}
