//! Asks every question and grades the answers.

use std::time::Instant;

use serde::Serialize;

use super::choice::letter;
use super::code::{completed, program, runs_code};
use super::maths::{equal, final_answer};
use super::{Answerer, Expected, Outcome, Question, Sandbox, Task, TaskError};

/// One answer with its grade; a line of the log.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Graded {
    /// Which variant of the answerer gave it.
    #[serde(skip)]
    pub variant: usize,
    /// Name of the question.
    pub id: String,
    /// Whether it was right.
    pub correct: bool,
    /// What was taken from the answer.
    pub extracted: Option<String>,
    /// What a right answer is; nothing for code.
    pub expected: Option<String>,
    /// What a program said that failed.
    pub message: Option<String>,
    /// What the model wrote.
    pub answer: String,
    /// Time to answer.
    pub seconds: f64,
}

/// The result of a task.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Score {
    /// Right answers.
    pub correct: usize,
    /// Questions.
    pub total: usize,
    /// Time to answer them all, grading not included.
    pub seconds: f64,
}

impl Score {
    /// The share of right answers.
    pub fn fraction(&self) -> f64 {
        if self.total == 0 { 0.0 } else { self.correct as f64 / self.total as f64 }
    }
}

/// Asks each of `questions` of every variant, and gives the score of each variant. `sandbox` is needed for tasks
/// whose answers are programs. Every graded answer is passed to `each`, which may end the run by returning false.
pub fn run(
    task: Task,
    questions: &[Question],
    answerer: &mut dyn Answerer,
    variants: usize,
    sandbox: Option<&Sandbox>,
    max_tokens: usize,
    each: &mut dyn FnMut(&Graded) -> bool,
) -> Result<Vec<Score>, TaskError> {
    if runs_code(task) && sandbox.is_none() {
        return Err(TaskError::CodeNotAllowed { task });
    }
    let mut scores = vec![Score::default(); variants];
    for question in questions {
        for (variant, score) in scores.iter_mut().enumerate() {
            let started = Instant::now();
            let mut answer = answerer
                .answer(&question.prompt, variant, max_tokens)
                .map_err(|source| TaskError::Answerer { id: question.id.clone(), source })?;
            let seconds = started.elapsed().as_secs_f64();
            // An answerer may stop late; what counts ends where it should.
            if let Some(end) = question.prompt.stop.iter().filter_map(|stop| answer.find(stop.as_str())).min()
            {
                answer.truncate(end);
            }
            let graded = grade(task, question, variant, answer, seconds, sandbox)?;
            score.total += 1;
            score.correct += usize::from(graded.correct);
            score.seconds += seconds;
            if !each(&graded) {
                return Ok(scores);
            }
        }
    }
    Ok(scores)
}

fn grade(
    task: Task,
    question: &Question,
    variant: usize,
    answer: String,
    seconds: f64,
    sandbox: Option<&Sandbox>,
) -> Result<Graded, TaskError> {
    let (correct, extracted, expected, message) = match &question.expected {
        Expected::Choice { letter: right, options } => {
            let found = letter(&answer, *options);
            (found == Some(*right), found.map(String::from), Some(right.to_string()), None)
        }
        Expected::Maths(right) => {
            let found = final_answer(&answer);
            let correct = found.as_deref().is_some_and(|found| equal(found, right));
            (correct, found, Some(right.clone()), None)
        }
        Expected::Code { prompt, test, entry_point } => {
            let sandbox = sandbox.ok_or(TaskError::CodeNotAllowed { task })?;
            let code = completed(prompt, entry_point, &answer, question.prompt.style);
            let (correct, message) = match sandbox.run(&program(&code, test, entry_point))? {
                Outcome::Passed => (true, None),
                Outcome::Failed(said) => (false, Some(said)),
                Outcome::TimedOut => (false, Some("took too long".to_owned())),
            };
            (correct, Some(code), None, message)
        }
    };
    Ok(Graded { variant, id: question.id.clone(), correct, extracted, expected, message, answer, seconds })
}

#[cfg(test)]
mod tests {
    use super::super::{AnswererError, Limits, Prompt, Style};
    use super::*;

    /// Answers from a list, and remembers what it was asked.
    struct Scripted {
        answers: Vec<&'static str>,
        asked: Vec<String>,
    }

    impl Scripted {
        fn new(answers: &[&'static str]) -> Scripted {
            Scripted { answers: answers.to_vec(), asked: Vec::new() }
        }
    }

    impl Answerer for Scripted {
        fn answer(&mut self, prompt: &Prompt, _: usize, _: usize) -> Result<String, AnswererError> {
            let answer = self.answers.get(self.asked.len()).ok_or("no answer left")?;
            self.asked.push(prompt.text.clone());
            Ok((*answer).to_owned())
        }
    }

    fn question(expected: Expected, style: Style, stop: &[&str]) -> Question {
        let prompt =
            Prompt { text: "q".into(), style, stop: stop.iter().map(|stop| (*stop).to_owned()).collect() };
        Question { id: "1".into(), prompt, expected }
    }

    #[test]
    fn letters_and_values_are_graded() {
        let choice = question(Expected::Choice { letter: 'B', options: 4 }, Style::Chat, &[]);
        let mut log = Vec::new();
        let mut each = |graded: &Graded| {
            log.push((graded.correct, graded.extracted.clone()));
            true
        };
        let mut scripted = Scripted::new(&["Answer: B", "Answer: C", "no idea"]);
        let questions = [choice.clone(), choice.clone(), choice];
        let score = run(Task::Gpqa, &questions, &mut scripted, 1, None, 10, &mut each).expect("score")[0];
        assert_eq!((score.correct, score.total), (1, 3));
        assert_eq!(log, [(true, Some("B".into())), (false, Some("C".into())), (false, None)]);

        let maths = question(Expected::Maths("\\frac{1}{2}".into()), Style::Plain, &["\nProblem:"]);
        let mut scripted = Scripted::new(&["so 0.5\nProblem: 7", "\\boxed{2}"]);
        let score = run(Task::Math500, &[maths.clone(), maths], &mut scripted, 1, None, 10, &mut |_| true)
            .expect("score")[0];
        assert_eq!((score.correct, score.fraction()), (1, 0.5));
    }

    #[test]
    fn every_variant_answers_a_question_before_the_next() {
        struct Parrot(Vec<(String, usize)>);
        impl Answerer for Parrot {
            fn answer(&mut self, prompt: &Prompt, variant: usize, _: usize) -> Result<String, AnswererError> {
                self.0.push((prompt.text.clone(), variant));
                Ok(variant.to_string())
            }
        }
        let mut questions = vec![question(Expected::Maths("1".into()), Style::Chat, &[]); 2];
        questions[1].prompt.text = "r".into();
        let mut parrot = Parrot(Vec::new());
        let scores = run(Task::Aime, &questions, &mut parrot, 2, None, 9, &mut |_| true).expect("scores");
        assert_eq!(parrot.0, [("q".into(), 0), ("q".into(), 1), ("r".into(), 0), ("r".into(), 1)]);
        assert_eq!((scores[0].correct, scores[1].correct, scores[1].total), (0, 2, 2));
    }

    #[test]
    fn runs_can_end_early_and_errors_name_the_question() {
        let maths = question(Expected::Maths("1".into()), Style::Chat, &[]);
        let questions = vec![maths; 3];
        let mut scripted = Scripted::new(&["1"]);
        let score =
            run(Task::Aime, &questions, &mut scripted, 1, None, 10, &mut |_| false).expect("score")[0];
        assert_eq!(score.total, 1);
        let error = run(Task::Aime, &questions, &mut Scripted::new(&[]), 1, None, 10, &mut |_| true)
            .expect_err("none");
        assert_eq!(error.to_string(), "question 1: no answer left");
    }

    #[test]
    fn code_is_not_run_unless_it_may() {
        let code = Expected::Code { prompt: String::new(), test: String::new(), entry_point: "f".into() };
        let mut scripted = Scripted::new(&["pass"]);
        let error = run(
            Task::HumanEval,
            &[question(code, Style::Chat, &[])],
            &mut scripted,
            1,
            None,
            10,
            &mut |_| true,
        )
        .expect_err("not allowed");
        assert!(matches!(error, TaskError::CodeNotAllowed { .. }));
        assert!(scripted.asked.is_empty(), "nothing is generated for nothing");
    }

    #[cfg(unix)]
    #[test]
    fn code_is_graded_by_its_test() {
        let Ok(sandbox) = Sandbox::new(None, Limits::default()) else { return };
        let expected = Expected::Code {
            prompt: "def double(x):\n    \"\"\"Twice x.\"\"\"\n".into(),
            test: "def check(candidate):\n    assert candidate(2) == 4\n".into(),
            entry_point: "double".into(),
        };
        let chat = question(expected.clone(), Style::Chat, &[]);
        let plain = question(expected, Style::Plain, &["\ndef "]);
        let mut scripted = Scripted::new(&[
            "```python\ndef double(x):\n    return 2 * x\n```",
            "```python\ndef double(x):\n    return x\n```",
            "I cannot.",
            "    return x + x\n\ndef other(:",
        ]);
        let mut messages = Vec::new();
        let questions = [chat.clone(), chat.clone(), chat, plain];
        let score = run(Task::HumanEval, &questions, &mut scripted, 1, Some(&sandbox), 10, &mut |graded| {
            messages.push((graded.correct, graded.message.clone()));
            true
        })
        .expect("score")[0];
        assert_eq!(score.correct, 2, "{messages:?}");
        assert!(messages[0].0 && messages[3].0, "{messages:?}");
        assert!(messages[1].1.as_ref().is_some_and(|said| said.contains("AssertionError")), "{messages:?}");
        assert!(messages[2].1.as_ref().is_some_and(|said| said.contains("SyntaxError")), "{messages:?}");
    }
}
