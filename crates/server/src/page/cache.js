// The picture of the cache: what the pages of each request are, what the prefix tree keeps, how full the pools are.

import { ask } from "./server.js";
import { setting } from "./settings.js";

/** Milliseconds between two looks: while something is computed, at rest, and after a failure. */
const BUSY = 400;
const REST = 2000;
const FAILED = 5000;
/** Cells of a strip, and strips; more would only be slow. Longer runs are drawn with several pages to a cell. */
const MOST_CELLS = 160;
/** Runs of so many pages always have a cell for each. */
const FEW = 8;
const MOST_STRIPS = 12;

const panel = document.getElementById("cache");
const part = (id) => document.getElementById(id);
const numbers = new Intl.NumberFormat("en-GB");
const count = (value) => numbers.format(value);
const plural = (value, one, many) => `${count(value)} ${value === 1 ? one : many}`;

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${value.toLocaleString("en-GB", { maximumSignificantDigits: 3 })} ${units[unit]}`;
}

const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

/** Changes a text only where it differs, so that a selection in it survives. */
function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A row of cells, one per page. */
class Strip {
  constructor() {
    this.element = document.createElement("div");
    this.element.className = "strip";
    this.label = this.element.appendChild(document.createElement("p"));
    this.cells = this.element.appendChild(document.createElement("div"));
    this.cells.className = "cells";
    this.cells.setAttribute("role", "img");
  }

  /** Shows runs of pages, each with its state, length and perhaps another word for it; `shared` are underlined. */
  show(name, runs, shared = 0, filled = 0.5) {
    const group = Math.ceil(runs.reduce((sum, [, pages]) => sum + pages, 0) / MOST_CELLS);
    const classes = [];
    let page = 0;
    for (const [state, pages] of runs) {
      const step = pages > FEW ? group : 1;
      for (let done = 0; done < pages; done += step) {
        classes.push(`cell ${state}${page + done < shared ? " shared" : ""}`);
      }
      page += pages;
    }
    while (this.cells.childNodes.length > classes.length) this.cells.lastChild.remove();
    classes.forEach((name, index) => {
      const cell = this.cells.childNodes[index] ?? this.cells.appendChild(document.createElement("span"));
      if (cell.className !== name) cell.className = name;
      if (name.startsWith("cell filling")) cell.style.setProperty("--filled", `${100 * filled}%`);
    });
    const said = runs.map(([state, pages, word]) => `${count(pages)} ${word ?? state}`);
    if (shared) said.push(`${count(shared)} shared`);
    const scale = group > 1 ? ` · a cell is up to ${group} pages` : "";
    write(this.label, `${name} · ${said.join(", ") || "empty"}${scale}`);
    this.cells.setAttribute("aria-label", this.label.textContent);
  }
}

/** A pool as a bar. */
class Pool {
  constructor(name) {
    this.element = document.createElement("div");
    this.element.className = "pool";
    const line = this.element.appendChild(document.createElement("p"));
    line.appendChild(document.createElement("span")).textContent = name;
    this.text = line.appendChild(document.createElement("span"));
    const bar = this.element.appendChild(document.createElement("div"));
    bar.className = "bar";
    this.parts = ["request", "shared", "tree"].map((owner) => {
      const element = bar.appendChild(document.createElement("span"));
      element.className = owner;
      return [owner, element];
    });
  }

  show(pool) {
    this.element.hidden = pool.pages === 0;
    const used = pool.pages - pool.free;
    for (const [owner, element] of this.parts) {
      element.style.width = pool.pages ? `${(100 * pool[owner]) / pool.pages}%` : "0";
    }
    const size = pool.page_bytes ? ` of ${bytes(pool.page_bytes)}` : "";
    write(this.text, `${count(used)} of ${plural(pool.pages, "page", "pages")}${size}`);
  }
}

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
const pools = Object.entries({ exact: "bf16", sealed: "Sealed", scratch: "Scratch of prompts" }).map(
  ([name, title]) => {
    const pool = new Pool(title);
    part("pools").append(pool.element);
    return [name, pool];
  },
);
const tree = new Strip();
part("tree").append(tree.element);
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
  tree.show(plural(whole + cache.tree.tails, "page", "pages"), runs.filter(([, pages]) => pages > 0));
}

function notice(text) {
  part("cache-notice").hidden = !text;
  write(part("cache-notice"), text ?? "");
}

async function look() {
  const response = await ask("oscar/cache", setting("api_key"), { signal: AbortSignal.timeout(10000) });
  const cache = await response.json();
  notice(null);
  part("cache-body").hidden = false;
  showFigures(cache);
  showRequests(cache);
  showTree(cache);
  for (const [name, pool] of pools) pool.show(cache.pools[name]);
  return cache.running + cache.prefilling + cache.queued > 0;
}

let timer = 0;
let looking = false;
let again = false;
let busy = false;

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
    timer = setTimeout(refresh, busy ? Math.min(wait, BUSY) : wait);
  }
}

/** Says whether this page waits for an answer, when the picture should move. */
export function expectChange(value) {
  busy = value;
  refresh();
}

document.addEventListener("visibilitychange", refresh);
part("cache-toggle").addEventListener("click", refresh);
