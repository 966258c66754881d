//! Code: the program in an answer, and the program that tests it.

use super::maths::without_thoughts;
use super::{Style, Task};

/// The program of an answer: the first block of Python, or of any language, else the whole text.
pub(super) fn extracted(answer: &str) -> &str {
    let answer = without_thoughts(answer);
    let blocks = || {
        answer.match_indices("```").step_by(2).filter_map(|(at, fence)| {
            let rest = &answer[at + fence.len()..];
            let (language, body) = rest.split_once('\n')?;
            // An answer that was cut has no closing fence.
            Some((language.trim(), body.find("```").map_or(body, |end| &body[..end])))
        })
    };
    let python = blocks().find(|(language, _)| ["python", "py", "python3"].contains(language));
    python.or_else(|| blocks().next()).map_or(answer, |(_, body)| body)
}

/// What completes `prompt`: the rest of the function as it stands, or the function once more.
pub fn completed(prompt: &str, entry_point: &str, answer: &str, style: Style) -> String {
    if style == Style::Plain {
        return format!("{prompt}{answer}");
    }
    let code = extracted(answer);
    let defines = code.lines().any(|line| {
        let name = line.trim_start_matches("async ").strip_prefix("def ");
        name.and_then(|name| name.trim_start().strip_prefix(entry_point))
            .is_some_and(|rest| rest.trim_start().starts_with('('))
    });
    if defines {
        // The prompt stays: it has imports and helpers, and a function that ends in its docstring is whole.
        return format!("{prompt}\n\n{code}");
    }
    let first = code.lines().find(|line| !line.trim().is_empty()).unwrap_or("");
    if first.starts_with([' ', '\t']) {
        return format!("{prompt}{code}");
    }
    let body: Vec<String> = code.lines().map(|line| format!("    {line}")).collect();
    format!("{prompt}{}\n", body.join("\n"))
}

/// The whole program: what was completed, the test, and the call that runs it.
pub fn program(completed: &str, test: &str, entry_point: &str) -> String {
    format!("{completed}\n\n{test}\n\ncheck({entry_point})\n")
}

/// Whether grading runs programs.
pub(super) fn runs_code(task: Task) -> bool {
    task == Task::HumanEval
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROMPT: &str = "import math\n\ndef area(r):\n    \"\"\"Of a circle.\"\"\"\n";

    #[test]
    fn programs_are_found_in_answers() {
        for (answer, code) in [
            ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
            ("```\nx = 1\n```\n```python\ny = 2\n```", "y = 2\n"),
            ("```text\nx\n```", "x\n"),
            ("```py\nx = 1", "x = 1"),
            ("x = 1", "x = 1"),
            ("<think>```python\nno\n```</think>```python\nyes\n```", "yes\n"),
            ("``` ", "``` "),
            ("```", "```"),
        ] {
            assert_eq!(extracted(answer), code, "{answer}");
        }
    }

    #[test]
    fn functions_replace_and_bodies_continue() {
        let whole = "```python\ndef area(r):\n    return math.pi * r * r\n```";
        assert!(
            completed(PROMPT, "area", whole, Style::Chat).contains("\"\"\"\n\n\ndef area(r):\n    return")
        );
        let body = "```python\n    return math.pi * r * r\n```";
        assert!(
            completed(PROMPT, "area", body, Style::Chat).ends_with("\"\"\"\n    return math.pi * r * r\n")
        );
        let flat = "```python\nx = r * r\nreturn math.pi * x\n```";
        assert!(
            completed(PROMPT, "area", flat, Style::Chat)
                .ends_with("\"\"\"\n    x = r * r\n    return math.pi * x\n")
        );
        let other = "```python\ndef area2(r):\n    return 0\n```";
        assert!(completed(PROMPT, "area", other, Style::Chat).contains("\n    def area2"));
        assert_eq!(completed(PROMPT, "area", "    return 1", Style::Plain), format!("{PROMPT}    return 1"));
    }

    #[test]
    fn programs_end_with_the_check() {
        assert_eq!(program("a", "b", "f"), "a\n\nb\n\ncheck(f)\n");
    }
}
