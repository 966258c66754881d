//! Flags for telling routers what is in the prefix cache.

use clap::Args;
use oscar_server::{Endpoint, KvEventOptions, KvEventPublisher};
use tokio::runtime::Runtime;

use crate::failure::Failure;

/// What routers are told of the prefix cache.
#[derive(Debug, Args)]
#[command(next_help_heading = "Cache events")]
pub(super) struct EventArguments {
    /// Tell what is in the prefix cache over ZeroMQ, as SGLang's servers do: `tcp://127.0.0.1:5557`, or `tcp://*:5557` for
    /// all addresses. Prompts can be read there.
    #[arg(long, value_name = "ENDPOINT")]
    kv_events: Option<Endpoint>,

    /// Where subscribers request events they missed.
    #[arg(long, value_name = "ENDPOINT", requires = "kv_events")]
    kv_events_replay: Option<Endpoint>,

    /// What subscribers subscribe to; by default nothing, which is everything.
    #[arg(long, value_name = "TOPIC", requires = "kv_events")]
    kv_events_topic: Option<String>,
}

impl EventArguments {
    /// Takes the ports, if events are wanted.
    pub(super) fn publisher(&self, runtime: &Runtime) -> Result<Option<KvEventPublisher>, Failure> {
        let Some(endpoint) = self.kv_events.clone() else { return Ok(None) };
        let (replay, topic) =
            (self.kv_events_replay.clone(), self.kv_events_topic.clone().unwrap_or_default());
        let options = KvEventOptions { endpoint, replay, topic };
        let publisher = runtime.block_on(KvEventPublisher::bind(&options));
        publisher.map(Some).map_err(|error| {
            Failure::new(error.to_string()).with_fix("give another --kv-events or --kv-events-replay")
        })
    }
}
