// What the page asks the server: plain requests, and answers that come as events.

/** A request that was not answered, with what the server said about it. */
export class RequestError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Sends a request with the key, if there is one. Paths are relative, so that a proxy may put the page anywhere. */
export async function ask(path, key, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError("The server cannot be reached.", 0);
  }
  if (response.ok) return response;
  throw new RequestError(await reason(response), response.status);
}

/** Sends JSON. */
export function post(path, key, body, signal) {
  const headers = { "content-type": "application/json" };
  return ask(path, key, { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** Why a request was refused. */
async function reason(response) {
  const wait = response.headers.get("retry-after");
  let text = `The server answered with status ${response.status}.`;
  try {
    text = sentence((await response.json()).error.message);
  } catch {
    // A proxy in between speaks its own language; the status has to do.
  }
  return wait ? `${text} Try again in ${wait} s.` : text;
}

/** The server's messages as sentences. */
export function sentence(text) {
  const words = String(text);
  return words.charAt(0).toUpperCase() + words.slice(1) + (/[.!?]$/.test(words) ? "" : ".");
}

/** The events of a stream, until it says that it is done. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      rest += value;
      let begin = 0;
      for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n", begin)) {
        const data = dataOf(rest.slice(begin, end));
        begin = end + 2;
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
      rest = rest.slice(begin);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new RequestError("The connection ended before the answer did.", 0);
}

function dataOf(block) {
  const lines = block.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}
