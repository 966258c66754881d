// The conversation: what was said, what is sent, what comes back.

import { follow, refresh } from "./cache.js";
import { copyFrom } from "./copy.js";
import { apiKey, askForKey, whenKeyChanges } from "./key.js";
import { RequestError, ask, events, post, sentence } from "./server.js";
import { areGood, listModels, setting, wishes } from "./settings.js";
import { Turn } from "./turn.js";

const log = document.getElementById("log");
const hint = document.getElementById("hint");
const input = document.getElementById("message");
const send = document.getElementById("send");
const stop = document.getElementById("stop");
const status = document.getElementById("status");

/** Questions and answers that the server gets to see, from the first to the last. */
let turns = [];
/** What breaks off the answer in progress; null when there is none. */
let answering = null;

function say(text, failed = false) {
  status.textContent = text;
  status.classList.toggle("failed", failed);
}

function add(role, content) {
  hint.hidden = true;
  const turn = new Turn(log, role, content);
  turns.push(turn);
  log.scrollTop = log.scrollHeight;
  return turn;
}

/** Forgets a turn and those after it, also those that were no part of the conversation. */
function cutFrom(turn) {
  const place = turns.indexOf(turn);
  turns.length = place;
  while (turn.element.nextElementSibling) turn.element.nextElementSibling.remove();
  turn.remove();
}

/** The conversation as the server gets it. */
function messages() {
  const system = setting("system").trim();
  const said = turns.map(({ role, content }) => ({ role, content }));
  return system ? [{ role: "system", content: system }, ...said] : said;
}

/** A name for a request, by which its pages are found. */
function newRid() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Says how an answer went. */
function summary(finish, usage, seconds) {
  const parts = [];
  if (usage) {
    const { prompt_tokens: prompt, completion_tokens: tokens } = usage;
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${tokens} tokens`);
    if (seconds > 0 && tokens > 1) parts.push(`${((tokens - 1) / seconds).toFixed(1)} a second`);
    parts.push(`${cached} of ${prompt} prompt tokens from the cache`);
  }
  if (finish === "length") parts.push("cut off at the limit");
  if (finish === "abort") parts.push("broken off by the server");
  return parts.join(" · ");
}

/** Reads an answer to its end. */
async function receive(answer, body, signal) {
  const response = await post("v1/chat/completions", apiKey(), body, signal);
  let first = 0;
  let last = 0;
  let finish = null;
  let usage = null;
  for await (const event of events(response)) {
    if (event.error) throw new RequestError(sentence(event.error.message), 0);
    usage = event.usage ?? usage;
    const choice = event.choices?.[0];
    if (!choice) continue;
    finish = choice.finish_reason ?? finish;
    if (choice.delta?.content || choice.delta?.reasoning_content) {
      last = performance.now();
      first ||= last;
      answer.add(choice.delta);
    }
  }
  return summary(finish, usage, (last - first) / 1000);
}

/** Asks for an answer to what was said, or for more of the last one. */
async function respond(continued) {
  const rid = newRid();
  const options = { rid, stream: true, stream_options: { include_usage: true } };
  if (continued) Object.assign(options, { continue_final_message: true, add_generation_prompt: false });
  const body = { ...wishes(), messages: messages(), ...options };
  const answer = continued ?? add("assistant");
  answer.begin();
  const control = new AbortController();
  begin(control, rid);
  let note = "";
  let failure = null;
  try {
    note = await receive(answer, body, control.signal);
  } catch (error) {
    failure = error;
  }
  if (answering !== control) return; // A new chat began meanwhile.
  const stopped = control.signal.aborted;
  if (failure) note = stopped ? "Stopped." : failure.message;
  answer.end(note, Boolean(failure) && !stopped);
  if (failure && !answer.content) takeBack();
  finish(failure && !stopped ? "The answer failed." : stopped ? "Stopped." : "Done.");
  if (failure?.status === 401) {
    say("This server asks for an API key.", true);
    askForKey();
  }
}

/** Templates want turns that alternate, so a question without an answer is taken back. */
function takeBack() {
  const [question, answer] = turns.splice(-2);
  question.retire();
  answer.retire();
  input.value ||= question.content;
  grow();
}

function submit() {
  const text = input.value.trim();
  if (!text || answering || !areGood()) return;
  input.value = "";
  grow();
  input.focus();
  add("user", text);
  respond();
}

/** What the buttons of a message do. */
const actions = {
  copy: (turn, button) => copyFrom(button, turn.content),
  again(turn) {
    if (!areGood()) return;
    cutFrom(turn);
    respond();
  },
  continue(turn) {
    if (areGood()) respond(turn);
  },
  edit: (turn) => turn.edit((text) => rewrite(turn, text)),
};

/** Goes on from a turn with another text; what was said after it is forgotten. */
function rewrite(turn, text) {
  const next = turns[turns.indexOf(turn) + 1];
  if (next) cutFrom(next);
  turn.replace(text);
  input.focus();
  if (turn.role === "user") respond();
  else follow({ messages: messages() });
}

function begin(control, rid) {
  answering = control;
  for (const turn of turns) turn.endEdit();
  log.classList.add("answering");
  send.hidden = true;
  stop.hidden = false;
  say("Answering …");
  follow({ rid });
}

function finish(text) {
  answering = null;
  log.classList.remove("answering");
  if (document.activeElement === stop) input.focus();
  send.hidden = false;
  stop.hidden = true;
  say(text);
  follow({ messages: turns.length ? messages() : null });
}

function newChat() {
  answering?.abort();
  turns = [];
  for (const element of log.querySelectorAll(".message")) element.remove();
  hint.hidden = false;
  finish("");
  input.focus();
}

/** Finds out what is served. */
async function greet() {
  try {
    const response = await ask("v1/models", apiKey());
    listModels((await response.json()).data);
    say("");
    refresh();
  } catch (error) {
    say(error.status === 401 ? "This server asks for an API key." : error.message, true);
    if (error.status === 401) askForKey();
  }
}

/** The field grows with its text; where the style sheet can do that, it does. */
function grow() {
  if (CSS.supports("field-sizing", "content")) return;
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

document.getElementById("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
input.addEventListener("input", grow);
input.addEventListener("keydown", (event) => {
  // Enter may also choose a word in an input method.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && answering && !event.isComposing) {
    event.preventDefault();
    answering.abort();
  }
});
log.addEventListener("click", ({ target }) => {
  if (target.matches("button.copy")) copyFrom(target, target.closest("figure").querySelector("pre").textContent);
  const action = actions[target.dataset.action];
  const turn = turns.find(({ element }) => element.contains(target));
  if (action && turn && (!answering || target.dataset.action === "copy")) action(turn, target);
});
stop.addEventListener("click", () => answering?.abort());
document.getElementById("new-chat").addEventListener("click", newChat);
whenKeyChanges(greet);
greet();
