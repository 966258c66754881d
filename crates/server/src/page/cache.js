// The picture of the cache: what the pages of this chat and of each request are, what the prefix tree keeps, how full
// the pools are.

import { apiKey } from "./key.js";
import { ask, post } from "./server.js";
import { setting } from "./settings.js";
import { Pool, Strip, bytes, count, percent, plural, write } from "./strips.js";

/** Milliseconds between two looks: while something is computed, at rest, and after a failure. */
const BUSY = 400;
const REST = 2000;
const FAILED = 5000;
/** How long an answer about the cache may take. */
const PATIENCE = 10000;
/** Strips of requests; more would only be slow. */
const MOST_STRIPS = 12;

const panel = document.getElementById("cache");
const part = (id) => document.getElementById(id);

const figures = Object.fromEntries(
  ["Hit rate", "Bits per element", "Stored", "Saved against bf16"].map((name) => {
    const box = part("figures").appendChild(document.createElement("div"));
    box.appendChild(document.createElement("dt")).textContent = name;
    const value = box.appendChild(document.createElement("dd"));
    const detail = box.appendChild(document.createElement("dd"));
    detail.className = "small";
    return [name, (text, small) => (write(value, text), write(detail, small))];
  }),
);
const pools = Object.entries({
  exact: "bf16",
  sealed: "Sealed",
  high: "Sealed, high",
  scratch: "Scratch of prompts",
  host_exact: "bf16, host memory",
  host_sealed: "Sealed, host memory",
}).map(([name, title]) => {
  const pool = new Pool(title);
  part("pools").append(pool.element);
  return [name, pool];
});
const tree = new Strip();
part("tree").append(tree.element);
const own = new Strip();
part("own").append(own.element);
const strips = new Map();
const more = document.createElement("p");
more.className = "note";

function showFigures(cache) {
  const found = `${count(cache.cached_tokens)} of ${plural(cache.prompt_tokens, "token", "tokens")}`;
  figures["Hit rate"](cache.prompt_tokens ? percent(cache.hit_rate) : "–", found);
  const exact = cache.pools.exact.page_bytes;
  const bits = cache.bits_per_element.toLocaleString("en-GB", { maximumFractionDigits: 2 });
  figures["Bits per element"](bits, `room for ${plural(cache.capacity_tokens, "token", "tokens")}`);
  figures["Stored"](bytes(cache.stored_bytes), `${bytes(cache.bf16_bytes)} in bf16`);
  const share = cache.bf16_bytes ? percent(cache.saved_bytes / cache.bf16_bytes) : "–";
  figures["Saved against bf16"](share, bytes(cache.saved_bytes));
  const level = exact && cache.pools.sealed.page_bytes ? cache.pools.sealed.page_bytes / exact : 1;
  panel.style.setProperty("--sealed-level", `${100 * Math.min(1, level)}%`);
  write(part("cache-kind"), cache.kv);
  // Without the sink and the window, which the bits of the cache include.
  const width = (16 * level).toLocaleString("en-GB", { maximumFractionDigits: 2 });
  const format = `${cache.kv} (${width} bits an element)`;
  write(part("sealed-kind"), cache.pools.sealed.pages ? format : "fewer bits; this cache has none");
  write(part("page-tokens"), count(cache.page_tokens));
}

function showRequests(cache) {
  const load = [[cache.running, "answering"], [cache.prefilling, "reading the prompt"], [cache.queued, "waiting"]];
  const said = load.filter(([requests]) => requests > 0).map(([requests, what]) => `${count(requests)} ${what}`);
  write(part("load"), said.join(", "));
  const seen = new Set();
  const shown = cache.requests.slice(0, MOST_STRIPS);
  for (const request of shown) {
    const key = `${request.request}/${request.choice}`;
    seen.add(key);
    if (!strips.has(key)) {
      strips.set(key, new Strip());
      part("requests").append(strips.get(key).element);
    }
    const choice = request.choice ? `.${request.choice + 1}` : "";
    const name = `#${request.request}${choice} · ${plural(request.tokens, "token", "tokens")}`;
    const filled = (request.tokens % cache.page_tokens) / cache.page_tokens;
    strips.get(key).show(name, request.runs, request.shared_pages, filled);
  }
  for (const [key, strip] of strips) {
    if (seen.has(key)) continue;
    strip.element.remove();
    strips.delete(key);
  }
  const hidden = cache.requests.length - shown.length;
  write(more, hidden > 0 ? `and ${count(hidden)} more` : seen.size ? "" : "None at the moment.");
  part("requests").append(more);
}

function showTree(cache) {
  const { sealed } = cache.pools;
  const whole = cache.tree.pages;
  const packed = Math.min(whole, sealed.tree + sealed.shared);
  const warm = Math.min(packed, cache.tree.warm);
  // Only a cache that seals has pages that are kept from it.
  const plain = sealed.pages ? ["sink", whole - packed] : ["recent", whole - packed, "bf16"];
  const tails = ["filling", cache.tree.tails, "partly filled"];
  const runs = [plain, ["sealed", packed - warm], ["warm", warm], tails];
  const name = plural(whole + cache.tree.tails, "page", "pages");
  const evicted = cache.tree.evicted ? `${name}, ${count(cache.tree.evicted)} evicted so far` : name;
  tree.show(evicted, runs.filter(([, pages]) => pages > 0));
}

/** The chat of this page: the name of the request that answers it, or at rest its messages; null before the first. */
let chat = { rid: null, messages: null };
/** What the server was asked about, so that it is asked again only when something changed. */
let looked = "";

async function showOwn(cache) {
  own.element.hidden = !chat.rid && !chat.messages;
  if (own.element.hidden) return write(part("own-bytes"), "Nothing has been said yet.");
  const view = chat.rid ? cache.requests.find(({ rid }) => rid === chat.rid) : await keptPages(cache);
  // A request that waits has no pages.
  if (!view) return;
  const filled = (view.tokens % cache.page_tokens) / cache.page_tokens;
  own.show(plural(view.tokens, "token", "tokens"), view.runs, view.shared_pages, filled);
  const share = view.bf16_bytes ? ` (${percent(view.stored_bytes / view.bf16_bytes)})` : "";
  write(part("own-bytes"), `${bytes(view.stored_bytes)} stored, ${bytes(view.bf16_bytes)} in bf16${share}`);
}

/** Which pages of this chat are kept for its next turn, unless nothing changed since they were asked for. */
async function keptPages(cache) {
  const { messages } = chat;
  const state = JSON.stringify([cache.tree, messages]);
  if (state === looked) return null;
  const body = { model: setting("model") || undefined, messages };
  try {
    const response = await post("oscar/cache", apiKey(), body, AbortSignal.timeout(PATIENCE));
    const view = await response.json();
    if (messages !== chat.messages) return null;
    looked = state;
    return view;
  } catch (error) {
    // A template may change what was said, and then it cannot be found; the rest of the picture can.
    if (error.status !== 400) throw error;
    looked = state;
    write(part("own-bytes"), "The pages of this chat cannot be told from others.");
    return null;
  }
}

function notice(text) {
  part("cache-notice").hidden = !text;
  write(part("cache-notice"), text ?? "");
}

async function look() {
  const response = await ask("oscar/cache", apiKey(), { signal: AbortSignal.timeout(PATIENCE) });
  const cache = await response.json();
  notice(null);
  part("cache-body").hidden = false;
  showFigures(cache);
  showRequests(cache);
  showTree(cache);
  for (const [name, pool] of pools) pool.show(cache.pools[name]);
  await showOwn(cache);
  return cache.running + cache.prefilling + cache.queued > 0;
}

let timer = 0;
let looking = false;
let again = false;

/** Looks now and then from now on; at once if something changed. */
export async function refresh() {
  clearTimeout(timer);
  if (looking) {
    again = true;
    return;
  }
  looking = true;
  let wait = REST;
  try {
    if (!panel.hidden && !document.hidden && (await look())) wait = BUSY;
  } catch (error) {
    notice(error.status === 401 ? "The picture needs the API key." : "The picture cannot be loaded at the moment.");
    // Without the key there is nothing to see until somebody enters one.
    wait = error.status === 401 ? Infinity : FAILED;
  }
  looking = false;
  if (again) {
    again = false;
    refresh();
  } else if (wait < Infinity) {
    timer = setTimeout(refresh, chat.rid ? Math.min(wait, BUSY) : wait);
  }
}

/** Says what the chat of this page is; the picture moves while it is answered. */
export function follow(next) {
  chat = next;
  looked = "";
  refresh();
}

document.addEventListener("visibilitychange", refresh);
part("cache-toggle").addEventListener("click", refresh);
