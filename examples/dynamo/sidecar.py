"""Makes an `oscar serve` a worker of NVIDIA Dynamo.

Dynamo's frontend turns prompts into token ids and picks a worker; this process hands the ids to one oscar server beside
it (`/generate`, streamed) and the drawn ids back. Nothing is computed here. How to run it is in README.md.
"""

import argparse
import json

import aiohttp
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.publisher import ZmqSource
from dynamo.common.backend.run import run

# Settings that both sides know by the same name.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
            "repetition_penalty")
# oscar's words for the end of an answer, in Dynamo's.
FINISHED = {"stop": "stop", "length": "length", "abort": "cancelled"}


class OscarEngine(LLMEngine):
    """One oscar server."""

    def __init__(self, arguments):
        self.url = arguments.oscar.rstrip("/")
        self.model = arguments.model_path
        self.name = arguments.served_model_name
        self.key = arguments.api_key
        self.session = None
        self.events = None

    @classmethod
    async def from_args(cls, argv=None):
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--oscar", default="http://127.0.0.1:30000", help="where the server listens")
        parser.add_argument("--api-key", help="its key, if it has one")
        parser.add_argument("--model-path", required=True,
                            help="folder with the tokenizer, config and chat template of the served model")
        parser.add_argument("--served-model-name", required=True)
        parser.add_argument("--namespace", default="dynamo")
        parser.add_argument("--discovery-backend", default="file", choices=["file", "etcd", "kubernetes", "mem"])
        parser.add_argument("--request-plane", default="tcp", choices=["tcp", "nats"])
        parser.add_argument("--event-plane", default="zmq", choices=["zmq", "nats"])
        arguments = parser.parse_args(argv)
        config = WorkerConfig(
            namespace=arguments.namespace,
            component="oscar",
            model_name=arguments.model_path,
            served_model_name=arguments.served_model_name,
            discovery_backend=arguments.discovery_backend,
            request_plane=arguments.request_plane,
            event_plane=arguments.event_plane,
        )
        return cls(arguments), config

    async def start(self, worker_id):
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        # Answers take as long as they take; only connecting may not.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self.session = aiohttp.ClientSession(self.url, headers=headers, timeout=timeout,
                                             connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 22)
        async with self.session.get("/server_info") as response:
            response.raise_for_status()
            info = await response.json()
        self.events = info.get("kv_events")
        page = info["page_size"]
        return EngineConfig(
            model=self.model,
            served_model_name=self.name,
            llm=LlmRegistration(
                context_length=info["context_length"],
                kv_cache_block_size=page,
                total_kv_blocks=info["max_total_num_tokens"] // page,
                max_num_seqs=info["max_running_requests"],
                max_num_batched_tokens=info["max_prefill_tokens"],
            ),
        )

    async def kv_event_sources(self):
        """Where oscar tells what is in its cache (`--kv-events`); without it Dynamo routes by load alone."""
        if not self.events:
            return []
        host = self.events["endpoint_host"]
        host = "127.0.0.1" if host in ("*", "0.0.0.0") else host
        endpoint = f"tcp://{host}:{self.events['endpoint_port_base']}"
        return [ZmqSource(endpoint=endpoint, topic=self.events.get("topic") or "")]

    async def generate(self, request, context):
        prompt = request["token_ids"]
        body = {"input_ids": list(prompt), "stream": True, "rid": context.id(), "sampling_params": sampling(request)}
        said = 0
        async with self.session.post("/generate", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"oscar: {response.status}: {(await response.text())[:500]}")
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[len(b"data: "):])
                if "error" in event:
                    raise RuntimeError(f"oscar: {event['error']['message']}")
                # Events carry all ids so far.
                ids, meta = event["output_ids"], event["meta_info"]
                chunk = {"token_ids": ids[said:], "index": 0}
                said = len(ids)
                if finish := meta["finish_reason"]:
                    chunk["finish_reason"] = FINISHED.get(finish["type"], "stop")
                    chunk["completion_usage"] = {
                        "prompt_tokens": len(prompt),
                        "completion_tokens": said,
                        "total_tokens": len(prompt) + said,
                        "prompt_tokens_details": {"cached_tokens": meta["cached_tokens"]},
                    }
                yield chunk

    async def abort(self, context):
        async with self.session.post("/abort_request", json={"rid": context.id()}):
            pass

    async def cleanup(self):
        if self.session is not None:
            await self.session.close()
            self.session = None


def sampling(request):
    """Dynamo's settings in oscar's names. Stop texts are looked for by the frontend, which has the text."""
    wanted, stop = request.get("sampling_options") or {}, request.get("stop_conditions") or {}
    if (wanted.get("n") or 1) != 1:
        raise ValueError("n: this worker gives one answer to a request")
    params = {name: wanted[name] for name in SAMPLING if wanted.get(name) is not None}
    # A schema, a regular expression or a grammar.
    form = {name: value for name, value in (wanted.get("guided_decoding") or {}).items() if value is not None}
    if strangers := set(form) - {"json", "regex", "grammar", "backend"}:
        raise ValueError(f"guided_decoding: {', '.join(sorted(strangers))} cannot be handed on")
    for theirs, ours in (("json", "json_schema"), ("regex", "regex"), ("grammar", "ebnf")):
        if theirs in form:
            params[ours] = form[theirs]
    for theirs, ours in (("max_tokens", "max_new_tokens"), ("min_tokens", "min_new_tokens"),
                         ("stop_token_ids_hidden", "stop_token_ids"), ("ignore_eos", "ignore_eos")):
        if stop.get(theirs) is not None:
            params[ours] = stop[theirs]
    # Without a limit the context ends an answer; oscar's own default is 128 here.
    params.setdefault("max_new_tokens", 1 << 30)
    return params


if __name__ == "__main__":
    run(OscarEngine)
