// The conversation: what was said, what is sent, what comes back.

import { expectChange, refresh } from "./cache.js";
import { GrowingText } from "./markdown.js";
import { RequestError, ask, events, sentence } from "./server.js";
import { areGood, askForKey, listModels, setting, whenKeyChanges, wishes } from "./settings.js";

const log = document.getElementById("log");
const hint = document.getElementById("hint");
const input = document.getElementById("message");
const send = document.getElementById("send");
const stop = document.getElementById("stop");
const status = document.getElementById("status");

/** Messages as the server gets them. */
let messages = [];
/** What breaks off the answer in progress; null when there is none. */
let answering = null;

function say(text, failed = false) {
  status.textContent = text;
  status.classList.toggle("failed", failed);
}

function article(role, label) {
  const element = document.createElement("article");
  element.className = `message ${role}`;
  element.setAttribute("aria-label", label);
  log.append(element);
  return element;
}

function appendDiv(parent, name) {
  const element = parent.appendChild(document.createElement("div"));
  element.className = name;
  return element;
}

/** An answer on the page. Pieces are collected and drawn once per frame. */
class Answer {
  constructor() {
    this.element = article("assistant", "Answer");
    // Screen readers wait for the whole answer instead of reading every piece.
    this.element.setAttribute("aria-busy", "true");
    this.text = new GrowingText(appendDiv(this.element, "text"));
    this.content = "";
    this.reasoning = "";
    this.thinking = null;
    this.frame = 0;
  }

  add(delta) {
    this.content += delta.content ?? "";
    this.reasoning += delta.reasoning_content ?? "";
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 48;
    if (this.reasoning) this.drawThinking();
    this.text.show(this.content);
    if (follow) log.scrollTop = log.scrollHeight;
  }

  drawThinking() {
    if (!this.thinking) {
      this.thinking = document.createElement("details");
      this.thinking.className = "thinking";
      this.thinking.append(document.createElement("summary"), document.createElement("div"));
      this.element.prepend(this.thinking);
    }
    const [title, text] = this.thinking.children;
    title.textContent = this.content ? "Thoughts" : "Thinking …";
    text.textContent = this.reasoning;
  }

  end(note, failed) {
    this.draw();
    if (this.thinking) this.thinking.firstChild.textContent = "Thoughts";
    const footer = document.createElement("footer");
    footer.textContent = note;
    footer.classList.toggle("failed", failed);
    this.element.append(footer);
    this.element.setAttribute("aria-busy", "false");
    log.scrollTop = log.scrollHeight;
  }
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
async function receive(answer, signal) {
  const system = setting("system").trim();
  const body = {
    ...wishes(),
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  const headers = { "content-type": "application/json" };
  const options = { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await ask("v1/chat/completions", setting("api_key"), options);
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

async function submit() {
  const text = input.value.trim();
  if (!text || answering || !areGood()) return;
  hint.hidden = true;
  input.value = "";
  input.focus();
  appendDiv(article("user", "You"), "text").textContent = text;
  messages.push({ role: "user", content: text });
  const answer = new Answer();
  log.scrollTop = log.scrollHeight;
  const control = new AbortController();
  begin(control);
  let note = "";
  let failure = null;
  try {
    note = await receive(answer, control.signal);
  } catch (error) {
    failure = error;
  }
  if (answering !== control) return; // A new chat began meanwhile.
  const stopped = control.signal.aborted;
  if (failure) note = stopped ? "Stopped." : failure.message;
  answer.end(note, Boolean(failure) && !stopped);
  if (answer.content) {
    messages.push({ role: "assistant", content: answer.content });
  } else if (failure) {
    // Templates want turns that alternate, so a question without an answer is taken back.
    messages.pop();
    input.value ||= text;
  }
  finish(failure && !stopped ? "The answer failed." : stopped ? "Stopped." : "Done.");
  if (failure?.status === 401) {
    say("This server asks for an API key.", true);
    askForKey();
  }
}

function begin(control) {
  answering = control;
  send.hidden = true;
  stop.hidden = false;
  say("Answering …");
  expectChange(true);
}

function finish(text) {
  answering = null;
  if (document.activeElement === stop) input.focus();
  send.hidden = false;
  stop.hidden = true;
  say(text);
  expectChange(false);
}

function newChat() {
  answering?.abort();
  messages = [];
  for (const element of log.querySelectorAll(".message")) element.remove();
  hint.hidden = false;
  finish("");
  input.focus();
}

/** Finds out what is served. */
async function greet() {
  try {
    const response = await ask("v1/models", setting("api_key"));
    listModels((await response.json()).data);
    say("");
    refresh();
  } catch (error) {
    say(error.status === 401 ? "This server asks for an API key." : error.message, true);
    if (error.status === 401) askForKey();
  }
}

document.getElementById("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
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
stop.addEventListener("click", () => answering?.abort());
document.getElementById("new-chat").addEventListener("click", newChat);
whenKeyChanges(greet);
greet();
