//! One render of one template: the environment transformers gives its templates, rebuilt and bounded.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, SystemTime};

use minijinja::machinery::{CompiledTemplate, TemplateConfig, Vm, WhitespaceConfig, make_string_output};
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, UndefinedBehavior};

use super::TextError;
use super::marked::MarkedLiterals;
use super::python_format::{python_str, tojson};
use super::render_budget::RenderBudget;
use super::render_limits;
use super::strftime::strftime;

/// Stack of the rendering thread, large enough for values nested as deeply as the fuel allows; memory pages are only
/// committed when touched.
const STACK_BYTES: usize = 512 << 20;
/// Real templates render in well under a millisecond per message.
const TIME_LIMIT: Duration = Duration::from_secs(30);

/// The input of a render, owned so that it can move to the thread that renders.
pub(super) struct RenderJob {
    pub(super) source: Arc<str>,
    pub(super) variables: BTreeMap<String, Value>,
    /// Size of the conversation and the tools in bytes.
    pub(super) input_bytes: usize,
    /// Number of messages and tools.
    pub(super) items: usize,
    pub(super) now: SystemTime,
    /// Marks for the control tokens of the template, if any are wanted.
    pub(super) literals: Option<MarkedLiterals>,
}

/// Compiles a template to see whether it can be.
pub(super) fn check(source: &str) -> Result<(), TextError> {
    compile(source).map(|_| ()).map_err(|error| failure(&error, None))
}

/// Renders on a thread of its own, whose stack is large enough for whatever the fuel allows. A template that
/// finds a way to be slow despite the limits is left behind to run out of fuel.
pub(super) fn render(job: RenderJob) -> Result<String, TextError> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let broken = |reason: String| TextError::Template { line: 0, reason };
    std::thread::Builder::new()
        .name("chat template".to_owned())
        .stack_size(STACK_BYTES)
        .spawn(move || {
            let result = run(job);
            // Nobody listens any more when the time limit has passed.
            let _ = sender.send(result);
        })
        .map_err(|error| broken(format!("cannot start a thread to render: {error}")))?;
    match receiver.recv_timeout(TIME_LIMIT) {
        Ok(result) => result,
        Err(mpsc::RecvTimeoutError::Timeout) => Err(TextError::TemplateLimit {
            line: 0,
            reason: format!("rendering takes more than {} s", TIME_LIMIT.as_secs()),
        }),
        Err(mpsc::RecvTimeoutError::Disconnected) => Err(broken("rendering stopped unexpectedly".to_owned())),
    }
}

fn run(job: RenderJob) -> Result<String, TextError> {
    let budget = RenderBudget::new(job.input_bytes);
    let refusal = Arc::new(Mutex::new(None));
    let failure = |error: &Error| failure(error, job.literals.as_ref());
    let texts = OnceCell::new();
    let mut compiled = compile(&job.source).map_err(|error| failure(&error))?;
    if let Some(literals) = &job.literals {
        let texts = texts.get_or_init(|| literals.texts(&compiled));
        literals.put_into(&mut compiled, texts);
    }
    let longest_literal = render_limits::guard_operators(&mut compiled);
    let mut environment = environment(&budget, &refusal, job.now, job.literals.as_ref());
    environment.set_fuel(Some(render_limits::fuel(longest_literal, job.items)));

    let mut text = String::new();
    let outcome = Vm::new(&environment)
        .eval(
            &compiled.instructions,
            Value::from(job.variables),
            &compiled.blocks,
            &mut make_string_output(&mut text),
            AutoEscape::None,
        )
        .map(|_| ());
    match outcome {
        Ok(()) => Ok(text),
        Err(error) => {
            if let Some(message) = refusal.lock().unwrap_or_else(PoisonError::into_inner).take() {
                let message = unmarked(message, job.literals.as_ref());
                return Err(TextError::TemplateRefused { message });
            }
            let line = error.line().unwrap_or(0);
            if error.kind() == ErrorKind::OutOfFuel {
                return Err(TextError::TemplateLimit {
                    line,
                    reason: "the template does not come to an end".to_owned(),
                });
            }
            if budget.is_spent() {
                return Err(TextError::TemplateLimit {
                    line,
                    reason: "the template builds too much text".to_owned(),
                });
            }
            Err(failure(&error))
        }
    }
}

fn compile(source: &str) -> Result<CompiledTemplate<'_>, Error> {
    let config = TemplateConfig {
        syntax_config: minijinja::syntax::SyntaxConfig::default(),
        ws_config: WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true },
        default_auto_escape: Arc::new(|_| AutoEscape::None),
    };
    CompiledTemplate::new("chat template", source, &config)
}

/// The names a chat template may use. Nothing in it reaches files, other templates or the network.
fn environment(
    budget: &Arc<RenderBudget>,
    refusal: &Arc<Mutex<Option<String>>>,
    now: SystemTime,
    literals: Option<&MarkedLiterals>,
) -> Environment<'static> {
    // Filters are called through a second environment, so that the guarded ones can reach the originals.
    let mut filters = Environment::new();
    add_filters(&mut filters, budget);
    let filters = Arc::new(filters);

    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    add_filters(&mut environment, budget);
    render_limits::install(&mut environment, &filters, budget, literals);

    let formatter_budget = Arc::clone(budget);
    environment.set_formatter(move |output: &mut Output, _: &State, value: &Value| {
        if let Some(text) = value.as_str() {
            formatter_budget.charge(text.len() as u64)?;
            return output.write_str(text).map_err(Error::from);
        }
        let text = python_str(value)?;
        formatter_budget.charge(text.len() as u64)?;
        output.write_str(&text).map_err(Error::from)
    });

    // In Python nothing can be iterated over `None`, and texts and mappings have a length and items too.
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_test("sequence", |value: &Value| {
        matches!(
            value.kind(),
            ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Iterable | ValueKind::Undefined
        )
    });

    let refusal = Arc::clone(refusal);
    environment.add_function("raise_exception", move |message: Value| -> Result<Value, Error> {
        let message = python_str(&message)?;
        *refusal.lock().unwrap_or_else(PoisonError::into_inner) = Some(message.clone());
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", move |format: &str| strftime(format, now));
    environment
}

fn add_filters(environment: &mut Environment<'_>, budget: &Arc<RenderBudget>) {
    let json_budget = Arc::clone(budget);
    environment.add_filter("tojson", move |value: &Value, kwargs: Kwargs| {
        let text = tojson(value, &kwargs)?;
        json_budget.charge(text.len() as u64)?;
        Ok::<_, Error>(Value::from(text))
    });
    let string_budget = Arc::clone(budget);
    environment.add_filter("string", move |value: &Value| {
        let text = python_str(value)?;
        string_budget.charge(text.len() as u64)?;
        Ok::<_, Error>(Value::from(text))
    });
}

fn unmarked(text: String, literals: Option<&MarkedLiterals>) -> String {
    literals.iter().fold(text, |text, literals| literals.unmarked_text(&text))
}

/// One line that names the template line and the innermost reason.
fn failure(error: &Error, literals: Option<&MarkedLiterals>) -> TextError {
    let mut reason = error.kind().to_string();
    if let Some(detail) = error.detail() {
        reason = format!("{reason}: {detail}");
    }
    TextError::Template {
        line: error.line().unwrap_or(0),
        reason: unmarked(reason.replace('\n', " "), literals),
    }
}
