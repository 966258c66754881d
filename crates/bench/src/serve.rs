//! Speed of a server as its clients see it: any that speaks OpenAI's protocol over HTTP.

mod client;
mod workload;

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use self::client::{BenchClient, TimedAnswer};
pub use self::workload::{Arrival, Workload};

/// Why a server could not be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeBenchError {
    /// The address is not one of a server.
    #[error("{url:?} is not an address of a server: {reason}")]
    Url {
        /// The address as it was given.
        url: String,
        /// What is wrong with the address.
        reason: String,
    },
    /// Nothing listens at the address.
    #[error("cannot connect to {host}:{port}: {error}")]
    Connect {
        /// Host of the server.
        host: String,
        /// Port of the server.
        port: u16,
        /// Error of the connection.
        error: io::Error,
    },
    /// The server refused a request.
    #[error("the server answered {status}: {answer}")]
    Status {
        /// The HTTP status of the response.
        status: u16,
        /// The beginning of the server's answer.
        answer: String,
    },
    /// The connection failed.
    #[error("the connection failed: {0}")]
    Connection(#[from] hyper::Error),
    /// A request could not be written.
    #[error("cannot make a request: {0}")]
    Request(String),
    /// An answer did not end well.
    #[error("a stream did not end well: {0}")]
    Stream(String),
    /// There is no answer to measure.
    #[error("the server answered without a word, or did not count its tokens")]
    NothingToMeasure,
}

/// A measurement of a server: where it is, and what is sent to it.
#[derive(Clone, Debug)]
pub struct ServeBench {
    /// The server, such as `http://127.0.0.1:30000`.
    pub url: String,
    /// API key to send.
    pub api_key: Option<String>,
    /// Name of the model; servers of one model take any request without it.
    pub model: Option<String>,
    /// Whether chats are requested instead of completions.
    pub chat: bool,
    /// The prompts that clients send, and how long their answers are.
    pub workload: Workload,
    /// How the times are chosen at which requests are sent.
    pub arrival: Arrival,
    /// Requests that are measured.
    pub requests: usize,
    /// Requests before the measured ones, with prompts that have nothing in common with the measured ones.
    pub warmup: usize,
    /// The limits that goodput is counted with.
    pub limits: GoodputLimits,
}

/// The latency limits of goodput: an answer within both counts as good.
#[derive(Clone, Copy, Debug)]
pub struct GoodputLimits {
    /// Longest time to the first piece of text.
    pub ttft: Duration,
    /// Longest mean time per further token.
    pub tpot: Duration,
}

/// The measurement of a server.
#[derive(Clone, Debug, Serialize)]
pub struct ServeRow {
    /// How requests arrived, in words.
    pub arrival: String,
    /// Requests that were answered.
    pub requests: usize,
    /// Requests that were refused or broke off.
    pub failed: usize,
    /// Seconds from the first request to the last answer.
    pub seconds: f64,
    /// Mean tokens of a prompt, as the server counts them.
    pub prompt_tokens: f64,
    /// Mean tokens of an answer, as the server counts them.
    pub output_tokens: f64,
    /// The number of answers per second.
    pub requests_per_s: f64,
    /// Tokens of answers per second, all clients together.
    pub output_tokens_per_s: f64,
    /// Time to the first piece of text.
    pub ttft_ms_p50: f64,
    /// Time to the first piece of text.
    pub ttft_ms_p90: f64,
    /// Time to the first piece of text.
    pub ttft_ms_p99: f64,
    /// An answer's mean time per token after the first piece.
    pub tpot_ms_p50: f64,
    /// An answer's mean time per token after the first piece.
    pub tpot_ms_p90: f64,
    /// An answer's mean time per token after the first piece.
    pub tpot_ms_p99: f64,
    /// Time from one piece of text to the next.
    pub itl_ms_p50: f64,
    /// Time from one piece of text to the next.
    pub itl_ms_p90: f64,
    /// Time from one piece of text to the next.
    pub itl_ms_p99: f64,
    /// Time from the request to the end of its answer.
    pub e2e_ms_p50: f64,
    /// Time from the request to the end of its answer.
    pub e2e_ms_p99: f64,
    /// Goodput: good answers per second.
    pub goodput_per_s: f64,
    /// Share of all requests that got a good answer.
    pub good: f64,
    /// Share of prompt tokens that came from the server's cache, as it says.
    pub hit_rate: f64,
}

/// Sends the requests and waits for all answers.
pub async fn serve(bench: &ServeBench) -> Result<ServeRow, ServeBenchError> {
    let bench = Arc::new(bench.clone());
    let client = Arc::new(BenchClient::new(&bench.url, bench.api_key.clone())?);
    // The first request also finds out whether there is a server at all.
    for prompt in bench.workload.unrelated().prompts(bench.warmup.max(1)) {
        bench.stream_answer(&client, &prompt).await?;
    }
    let prompts = Arc::new(bench.workload.prompts(bench.requests));
    let begun = Instant::now();
    let mut tasks = JoinSet::new();
    match bench.arrival {
        Arrival::Poisson { rate } => {
            let mut due = begun;
            for (number, gap) in (0..prompts.len()).zip(bench.workload.arrival_intervals(rate)) {
                due += gap;
                tokio::time::sleep_until(due.into()).await;
                let (bench, client, prompts) =
                    (Arc::clone(&bench), Arc::clone(&client), Arc::clone(&prompts));
                tasks.spawn(async move { vec![bench.stream_answer(&client, &prompts[number]).await] });
            }
        }
        Arrival::Closed { clients } => {
            let next = Arc::new(AtomicUsize::new(0));
            for _ in 0..clients {
                let (bench, client, prompts) =
                    (Arc::clone(&bench), Arc::clone(&client), Arc::clone(&prompts));
                let next = Arc::clone(&next);
                tasks.spawn(async move {
                    let mut answers = Vec::new();
                    while let Some(prompt) = prompts.get(next.fetch_add(1, Ordering::Relaxed)) {
                        answers.push(bench.stream_answer(&client, prompt).await);
                    }
                    answers
                });
            }
        }
    }
    let answers: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
    bench.row(answers, begun)
}

impl ServeBench {
    fn stream_answer<'a>(
        &'a self,
        client: &'a BenchClient,
        prompt: &'a str,
    ) -> impl Future<Output = Result<TimedAnswer, ServeBenchError>> + 'a {
        let (path, mut body) = request(self.chat, prompt, self.workload.output_tokens);
        if let Some(model) = &self.model {
            body["model"] = json!(model);
        }
        async move { client.stream_answer(path, &body).await }
    }

    fn row(
        &self,
        answers: Vec<Result<TimedAnswer, ServeBenchError>>,
        begun: Instant,
    ) -> Result<ServeRow, ServeBenchError> {
        let (mut good_answers, mut failures) = (Vec::new(), Vec::new());
        for answer in answers {
            match answer {
                Ok(answer) => good_answers.push(answer),
                Err(error) => {
                    tracing::warn!("{error}");
                    failures.push(error);
                }
            }
        }
        let Some(last) = good_answers.iter().map(|answer| answer.ended).max() else {
            return Err(failures.pop().unwrap_or(ServeBenchError::NothingToMeasure));
        };
        let seconds = (last - begun).as_secs_f64();
        let (mut ttft, mut tpot, mut itl, mut e2e) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (mut prompt_tokens, mut output_tokens, mut cached_tokens, mut good) = (0, 0, 0, 0);
        for answer in &good_answers {
            let (Some(&first), Some(usage)) = (answer.pieces.first(), answer.usage) else {
                return Err(ServeBenchError::NothingToMeasure);
            };
            let to_first = first - answer.sent;
            let rest = answer.pieces[answer.pieces.len() - 1] - first;
            let per_token = rest.div_f64(usage.completion_tokens.saturating_sub(1).max(1) as f64);
            good += usize::from(to_first <= self.limits.ttft && per_token <= self.limits.tpot);
            ttft.push(to_first);
            tpot.push(per_token);
            e2e.push(answer.ended - answer.sent);
            itl.extend(answer.pieces.windows(2).map(|pair| pair[1] - pair[0]));
            prompt_tokens += usage.prompt_tokens;
            output_tokens += usage.completion_tokens;
            cached_tokens += usage.cached_tokens();
        }
        let answered = good_answers.len();
        let (ttft, tpot, itl, e2e) = (sorted(ttft), sorted(tpot), sorted(itl), sorted(e2e));
        Ok(ServeRow {
            arrival: match self.arrival {
                Arrival::Poisson { rate } => format!("poisson {rate}/s"),
                Arrival::Closed { clients } => format!("{clients} clients"),
            },
            requests: answered,
            failed: failures.len(),
            seconds,
            prompt_tokens: prompt_tokens as f64 / answered as f64,
            output_tokens: output_tokens as f64 / answered as f64,
            requests_per_s: answered as f64 / seconds,
            output_tokens_per_s: output_tokens as f64 / seconds,
            ttft_ms_p50: percentile(&ttft, 0.5),
            ttft_ms_p90: percentile(&ttft, 0.9),
            ttft_ms_p99: percentile(&ttft, 0.99),
            tpot_ms_p50: percentile(&tpot, 0.5),
            tpot_ms_p90: percentile(&tpot, 0.9),
            tpot_ms_p99: percentile(&tpot, 0.99),
            itl_ms_p50: percentile(&itl, 0.5),
            itl_ms_p90: percentile(&itl, 0.9),
            itl_ms_p99: percentile(&itl, 0.99),
            e2e_ms_p50: percentile(&e2e, 0.5),
            e2e_ms_p99: percentile(&e2e, 0.99),
            goodput_per_s: good as f64 / seconds,
            good: good as f64 / (answered + failures.len()) as f64,
            hit_rate: cached_tokens as f64 / (prompt_tokens as f64).max(1.0),
        })
    }
}

/// Path and body of a request for a stream.
fn request(chat: bool, prompt: &str, output_tokens: usize) -> (&'static str, Value) {
    let mut body = json!({"stream": true, "stream_options": {"include_usage": true}, "max_tokens": output_tokens,
        "temperature": 0, "ignore_eos": true});
    if chat {
        body["messages"] = json!([{"role": "user", "content": prompt}]);
        ("/v1/chat/completions", body)
    } else {
        body["prompt"] = json!(prompt);
        ("/v1/completions", body)
    }
}

/// Path and body of a request whose every token must have a text.
fn text_only_request(output_tokens: usize) -> (&'static str, Value) {
    let (path, mut body) = request(true, "go on", output_tokens);
    // Instead of an end that is ignored and has no text, there is none.
    body["ignore_eos"] = json!(false);
    body["min_tokens"] = json!(output_tokens);
    (path, body)
}

/// The measurement of how many events a server can stream.
#[derive(Clone, Debug, Serialize)]
pub struct StreamedRow {
    /// Streams at a time.
    pub clients: usize,
    /// Seconds for which events were counted.
    pub seconds: f64,
    /// Events that arrived per second, all clients together: one for each token, if the server sends them one by one.
    pub events_per_s: f64,
}

/// Opens streams without an end and counts what arrives for `seconds`, after a second of warm-up.
pub async fn streamed(url: &str, clients: usize, seconds: f64) -> Result<StreamedRow, ServeBenchError> {
    let client = Arc::new(BenchClient::new(url, None)?);
    let events = Arc::new(AtomicU64::new(0));
    let mut tasks = JoinSet::new();
    for _ in 0..clients {
        let (client, events) = (Arc::clone(&client), Arc::clone(&events));
        tasks.spawn(async move {
            let (path, body) = text_only_request(1_000_000_000);
            let add = |count| {
                events.fetch_add(count, Ordering::Relaxed);
            };
            client.count_events(path, &body, add).await
        });
    }
    let count = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (begun, before) = (Instant::now(), events.load(Ordering::Relaxed));
        tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
        let seconds = begun.elapsed().as_secs_f64();
        (seconds, (events.load(Ordering::Relaxed) - before) as f64 / seconds)
    };
    tokio::select! {
        (seconds, events_per_s) = count => Ok(StreamedRow { clients, seconds, events_per_s }),
        // Dropping the tasks closes the streams; one that ends by itself is a failure.
        Some(ended) = tasks.join_next() => Err(match ended {
            Ok(Err(error)) => error,
            _ => ServeBenchError::Stream("it has come to an end".to_owned()),
        }),
    }
}

/// When an engine emits its tokens: the first after `latency`, then one after each `interval`.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Time to the first token.
    pub latency: Duration,
    /// Time from one token to the next.
    pub interval: Duration,
}

/// The measurement of how much later than they were due tokens arrive.
#[derive(Clone, Debug, Serialize)]
pub struct AddedLatencyRow {
    /// Streams at a time.
    pub clients: usize,
    /// Tokens per second, all clients together.
    pub tokens_per_s: f64,
    /// The number of tokens that arrived.
    pub tokens: usize,
    /// Median time from sending a request to its first token, less the engine's time.
    pub first_ms_p50: f64,
    /// 99th percentile of the same.
    pub first_ms_p99: f64,
    /// Median time from sending a request to any of its tokens, less the engine's time.
    pub added_ms_p50: f64,
    /// From sending a request to any of its tokens, less the engine's time.
    pub added_ms_p99: f64,
    /// The largest added latency.
    pub added_ms_max: f64,
}

/// Asks a server whose engine keeps a known pace, and compares with it when tokens arrive; each client first asks
/// something short that does not count.
pub async fn added_latency(
    url: &str,
    pace: Pace,
    clients: usize,
    requests: usize,
    output_tokens: usize,
) -> Result<AddedLatencyRow, ServeBenchError> {
    let client = Arc::new(BenchClient::new(url, None)?);
    let begun = Instant::now();
    let mut tasks = JoinSet::new();
    for number in 0..clients {
        let client = Arc::clone(&client);
        tasks.spawn(async move {
            // People do not press their keys together.
            tokio::time::sleep(pace.interval.mul_f64(number as f64 * 0.618_034)).await;
            // A process that has just started touches its code and memory for the first time.
            let (path, body) = text_only_request(2);
            client.stream_answer(path, &body).await?;
            let (path, body) = text_only_request(output_tokens);
            let mut answers = Vec::new();
            for _ in 0..requests {
                answers.push(client.stream_answer(path, &body).await?);
            }
            Ok::<_, ServeBenchError>(answers)
        });
    }
    let (mut first, mut all) = (Vec::new(), Vec::new());
    for answers in tasks.join_all().await {
        for answer in answers? {
            if answer.pieces.len() != output_tokens {
                let reason = format!("{} pieces of text for {output_tokens} tokens", answer.pieces.len());
                return Err(ServeBenchError::Stream(reason));
            }
            let due = answer.sent + pace.latency;
            let late = answer
                .pieces
                .iter()
                .zip(0u32..)
                .map(|(&piece, number)| piece - (due + pace.interval * number));
            let late: Vec<Duration> = late.collect();
            first.push(late[0]);
            all.extend(late);
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    let (first, all) = (sorted(first), sorted(all));
    Ok(AddedLatencyRow {
        clients,
        tokens_per_s: all.len() as f64 / seconds,
        tokens: all.len(),
        first_ms_p50: percentile(&first, 0.5),
        first_ms_p99: percentile(&first, 0.99),
        added_ms_p50: percentile(&all, 0.5),
        added_ms_p99: percentile(&all, 0.99),
        added_ms_max: percentile(&all, 1.0),
    })
}

fn sorted(mut times: Vec<Duration>) -> Vec<Duration> {
    times.sort_unstable();
    times
}

/// The smallest time that a share of all does not exceed, in milliseconds; 0 if there are none.
fn percentile(sorted: &[Duration], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).map_or(0.0, |time| time.as_secs_f64() * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_that_were_measured() {
        let times: Vec<Duration> = (1..=200).map(Duration::from_millis).collect();
        let of = |share| percentile(&times, share).round() as u64;
        assert_eq!((of(0.0), of(0.5), of(0.9), of(0.99), of(1.0)), (1, 100, 180, 198, 200));
        assert_eq!(percentile(&[], 0.5), 0.0);
    }
}
