//! From the layouts of published datasets to questions.

use std::path::Path;

use serde_json::{Map, Value};

use super::choice::{self, Options};
use super::lines::objects;
use super::maths::final_answer;
use super::{Expected, Prompt, Question, Style, Task, TaskError};
use crate::eval::text::{Random, mix};

/// What an answer in maths should look like.
const BOXED: &str = "Reason step by step, and put the final answer in \\boxed{}.";

/// Reads the questions of a file. `seed` orders the options of a multiple choice; `limit` keeps the first ones.
pub fn read(
    task: Task,
    path: &Path,
    style: Style,
    seed: u64,
    limit: Option<usize>,
) -> Result<Vec<Question>, TaskError> {
    let mut questions = Vec::new();
    for (line, object) in objects(path)?.into_iter().take(limit.unwrap_or(usize::MAX)) {
        let record = Record { object: &object };
        let question = match task {
            Task::Gpqa => multiple_choice(&record, style, mix(&[seed, line as u64])),
            Task::Aime | Task::Math500 => maths(&record, style),
            Task::HumanEval => code(&record, style),
        };
        let (prompt, expected) =
            question.map_err(|problem| TaskError::Line { path: path.to_owned(), line, problem })?;
        let id = record.first(&["task_id", "unique_id", "id", "ID", "Record ID", "idx"]).map(plain);
        questions.push(Question { id: id.unwrap_or_else(|| line.to_string()), prompt, expected });
    }
    if questions.is_empty() {
        return Err(TaskError::Empty { path: path.to_owned() });
    }
    Ok(questions)
}

type Parsed = Result<(Prompt, Expected), String>;

struct Record<'a> {
    object: &'a Map<String, Value>,
}

impl Record<'_> {
    fn first(&self, names: &[&str]) -> Option<&Value> {
        names.iter().find_map(|name| self.object.get(*name)).filter(|value| !value.is_null())
    }

    /// The text of the first field that is there. Numbers are taken as they are written.
    fn text(&self, names: &[&str]) -> Result<String, String> {
        match self.first(names) {
            Some(value @ (Value::String(_) | Value::Number(_))) => Ok(plain(value)),
            Some(_) => Err(format!("field `{}` is not text", names[0])),
            None => Err(format!("no field `{}`", names[0])),
        }
    }

    fn texts(&self, name: &str) -> Result<Vec<String>, String> {
        let wrong = || format!("field `{name}` is not a list of texts");
        let values = self.first(&[name]).and_then(Value::as_array).ok_or_else(wrong)?;
        values
            .iter()
            .map(|value| match value {
                Value::String(_) | Value::Number(_) => Ok(plain(value)),
                _ => Err(wrong()),
            })
            .collect()
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// GPQA as published (`Question`, `Correct Answer`, `Incorrect Answer 1` …), the same with a list of incorrect
/// answers, or a list of choices with the index or letter of the right one.
fn multiple_choice(record: &Record<'_>, style: Style, seed: u64) -> Parsed {
    let question = record.text(&["question", "Question", "problem"])?;
    let mut random = Random::new(seed);
    let options = if record.first(&["choices"]).is_some() {
        let choices = record.texts("choices")?;
        let answer = record.text(&["answer"])?;
        let index = answer.trim().parse().ok().or_else(|| choice::index_of(answer.trim()));
        match index {
            Some(index) if index < choices.len() => Options::ordered(choices, index),
            _ => return Err(format!("field `answer` ({answer}) is not one of {} choices", choices.len())),
        }
    } else {
        let right = record.text(&["correct_answer", "Correct Answer", "answer"])?;
        let wrong = match record.first(&["incorrect_answers"]) {
            Some(_) => record.texts("incorrect_answers")?,
            None => (1..=9)
                .filter_map(|number| {
                    record
                        .text(&[&format!("incorrect_answer_{number}"), &format!("Incorrect Answer {number}")])
                        .ok()
                })
                .collect(),
        };
        if wrong.is_empty() {
            return Err("no field `incorrect_answers`".to_owned());
        }
        Options::shuffled(right, wrong, &mut random)
    };
    let expected = Expected::Choice { letter: options.letter(), options: options.texts.len() };
    if options.texts.len() < 2 || options.texts.len() > choice::MOST_OPTIONS {
        return Err(format!(
            "{} options; between 2 and {} are possible",
            options.texts.len(),
            choice::MOST_OPTIONS
        ));
    }
    Ok((options.prompt(&question, style), expected))
}

/// A problem and its answer; where only a worked solution is given, the answer is in its box.
fn maths(record: &Record<'_>, style: Style) -> Parsed {
    let problem = record.text(&["problem", "Problem", "question", "Question"])?;
    let answer = match record.first(&["answer", "Answer"]) {
        // GSM8K writes the value behind its reasoning.
        Some(_) => record.text(&["answer", "Answer"])?.rsplit("####").next().unwrap_or("").trim().to_owned(),
        None => {
            let solution = record.text(&["solution"]).map_err(|_| "no field `answer`".to_owned())?;
            final_answer(&solution).ok_or("no field `answer`, and no answer in `solution`")?
        }
    };
    if answer.is_empty() {
        return Err("field `answer` is empty".to_owned());
    }
    let prompt = match style {
        Style::Chat => Prompt { text: format!("{problem}\n\n{BOXED}"), style, stop: Vec::new() },
        Style::Plain => Prompt {
            text: format!("Problem: {problem}\n{BOXED}\nSolution:"),
            style,
            stop: vec!["\nProblem:".to_owned()],
        },
    };
    Ok((prompt, Expected::Maths(answer)))
}

fn code(record: &Record<'_>, style: Style) -> Parsed {
    let prompt = record.text(&["prompt"])?;
    let test = record.text(&["test"])?;
    let entry_point = record.text(&["entry_point"])?;
    // It is written into the program; anything but a name would be a program of its own.
    let is_name = entry_point.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_')
        && entry_point.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_');
    if !is_name {
        return Err("field `entry_point` is not a name".to_owned());
    }
    let asked = match style {
        Style::Chat => Prompt {
            text: format!(
                "Complete this Python function. Answer with the whole function, with its imports, in one \
                 ```python block.\n\n```python\n{}\n```",
                prompt.trim_end()
            ),
            style,
            stop: Vec::new(),
        },
        Style::Plain => Prompt {
            text: prompt.clone(),
            style,
            // What begins in the first column is no longer the body of the function.
            stop: ["\ndef ", "\nclass ", "\nif ", "\nprint(", "\n#", "\n@", "\n```", "\nassert "]
                .map(str::to_owned)
                .to_vec(),
        },
    };
    Ok((asked, Expected::Code { prompt, test, entry_point }))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn parse(task: Task, text: &str, seed: u64) -> Result<Vec<Question>, TaskError> {
        let mut file = tempfile::NamedTempFile::new().expect("file");
        file.write_all(text.as_bytes()).expect("write");
        read(task, file.path(), Style::Chat, seed, None)
    }

    fn one(task: Task, text: &str) -> Question {
        parse(task, text, 1).expect("questions").remove(0)
    }

    #[test]
    fn gpqa_in_its_three_layouts() {
        for text in [
            r#"{"Question": "Which?", "Correct Answer": "right", "Incorrect Answer 1": "x", "Incorrect Answer 2": "y", "Incorrect Answer 3": "z", "Record ID": "rec1"}"#,
            r#"{"question": "Which?", "correct_answer": "right", "incorrect_answers": ["x", "y", "z"], "id": "rec1"}"#,
            r#"{"question": "Which?", "choices": ["x", "y", "right", "z"], "answer": "C", "id": "rec1"}"#,
            r#"{"question": "Which?", "choices": ["x", "y", "right", "z"], "answer": 2, "id": "rec1"}"#,
        ] {
            let question = one(Task::Gpqa, text);
            let Expected::Choice { letter, options: 4 } = question.expected else { panic!("{question:?}") };
            assert!(question.prompt.text.contains(&format!("{letter}) right\n")), "{}", question.prompt.text);
            assert!(question.prompt.text.contains("Which?"));
            assert_eq!(question.id, "rec1");
        }
    }

    #[test]
    fn options_are_ordered_by_the_seed() {
        let line =
            r#"{"question": "Which?", "correct_answer": "right", "incorrect_answers": ["x", "y", "z"]}"#;
        let text = [line; 40].join("\n");
        let letters = |seed| -> Vec<char> {
            let questions = parse(Task::Gpqa, &text, seed).expect("questions");
            let letter = |question: &Question| match question.expected {
                Expected::Choice { letter, .. } => letter,
                _ => unreachable!("multiple choice"),
            };
            questions.iter().map(letter).collect()
        };
        assert_eq!(letters(1), letters(1));
        assert_ne!(letters(1), letters(2));
        assert!(['A', 'B', 'C', 'D'].iter().all(|letter| letters(1).contains(letter)));
    }

    #[test]
    fn maths_with_an_answer_or_a_solution() {
        let question = one(Task::Aime, r#"{"ID": "2024-I-1", "Problem": "1+1?", "Answer": 2}"#);
        assert_eq!((question.id.as_str(), &question.expected), ("2024-I-1", &Expected::Maths("2".into())));
        let question =
            one(Task::Math500, r#"{"problem": "p", "solution": "so $\\boxed{\\frac{1}{2}}$.", "idx": 7}"#);
        assert_eq!(
            (question.id.as_str(), &question.expected),
            ("7", &Expected::Maths("\\frac{1}{2}".into()))
        );
        assert!(question.prompt.text.contains("\\boxed{}"));
        let question = one(Task::Math500, r##"{"question": "q", "answer": "2 * 9 = 18\n#### 18"}"##);
        assert_eq!(question.expected, Expected::Maths("18".into()));
    }

    #[test]
    fn human_eval_keeps_its_program() {
        let text = r#"{"task_id": "HumanEval/0", "prompt": "def f(x):\n    \"\"\"Doc.\"\"\"\n", "entry_point": "f", "canonical_solution": "    return x\n", "test": "def check(f):\n    assert f(1) == 1\n"}"#;
        let question = one(Task::HumanEval, text);
        let Expected::Code { entry_point, .. } = &question.expected else { panic!("{question:?}") };
        assert_eq!((question.id.as_str(), entry_point.as_str()), ("HumanEval/0", "f"));
        assert!(question.prompt.text.contains("```python\ndef f(x):"));
    }

    #[test]
    fn bad_records_name_the_line_and_the_field() {
        for (task, text, words) in [
            (Task::Gpqa, r#"{"question": "q"}"#, "no field `correct_answer`"),
            (Task::Gpqa, r#"{"question": "q", "answer": "a"}"#, "no field `incorrect_answers`"),
            (
                Task::Gpqa,
                r#"{"question": "q", "choices": ["a", "b"], "answer": "C"}"#,
                "not one of 2 choices",
            ),
            (Task::Gpqa, r#"{"question": "q", "choices": ["a"], "answer": 0}"#, "1 options"),
            (Task::Aime, r#"{"problem": ["p"], "answer": "1"}"#, "field `problem` is not text"),
            (Task::Math500, r#"{"problem": "p", "answer": " "}"#, "field `answer` is empty"),
            (Task::HumanEval, r#"{"prompt": "p", "test": "t"}"#, "no field `entry_point`"),
            (Task::HumanEval, r#"{"prompt": "p", "test": "t", "entry_point": "f); evil("}"#, "not a name"),
        ] {
            let error = parse(task, &format!("\n{text}"), 0).expect_err(words).to_string();
            assert!(error.contains("line 2: ") && error.contains(words), "{error}");
        }
        assert!(matches!(parse(Task::Aime, "\n\n", 0), Err(TaskError::Empty { .. })));
    }

    #[test]
    fn limits_keep_the_first() {
        let mut file = tempfile::NamedTempFile::new().expect("file");
        // What comes after the limit is read as JSON and no further.
        file.write_all(b"{\"problem\": \"p\", \"answer\": 1}\n{\"other\": 1}\n").expect("write");
        let read = |limit| read(Task::Aime, file.path(), Style::Plain, 0, limit);
        assert_eq!(read(Some(1)).expect("one").len(), 1);
        assert!(read(None).is_err());
    }
}
