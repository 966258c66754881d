// A message on the page: what was said, how it went, and what can be done with it.

import { GrowingText } from "./growing.js";

/** Milliseconds between two drawings of a growing answer, unless drawing takes long. */
const FRAME = 16;
/** So many times as long as a drawing took the page is left alone after it. */
const REST = 3;
const LABELS = { user: "You", assistant: "Answer" };
const ACTIONS = {
  user: { edit: "Edit" },
  assistant: { copy: "Copy", again: "Regenerate", continue: "Continue", edit: "Edit" },
};

function append(parent, tag, name) {
  const element = parent.appendChild(document.createElement(tag));
  element.className = name;
  return element;
}

function appendButton(parent, text, action) {
  const button = append(parent, "button", "");
  button.type = "button";
  button.textContent = text;
  if (action) button.dataset.action = action;
  return button;
}

export class Turn {
  constructor(log, role, content = "") {
    Object.assign(this, { log, role, content, reasoning: "", thinking: null, editor: null, timer: 0, cost: 0 });
    this.element = append(log, "article", `message ${role}`);
    this.element.setAttribute("aria-label", LABELS[role]);
    this.body = append(this.element, "div", "text");
    this.growing = role === "assistant" ? new GrowingText(this.body) : null;
    this.footer = append(this.element, "footer", "");
    this.actions = append(this.element, "div", "actions");
    for (const [action, text] of Object.entries(ACTIONS[role])) appendButton(this.actions, text, action);
    this.draw();
  }

  /** An answer begins, or goes on. Screen readers wait for all of it instead of reading every piece. */
  begin() {
    this.element.setAttribute("aria-busy", "true");
    this.footer.textContent = "";
  }

  /** A piece of an answer. Pieces are collected and drawn together. */
  add(delta) {
    this.content += delta.content ?? "";
    this.reasoning += delta.reasoning_content ?? "";
    this.timer ||= setTimeout(() => this.draw(), Math.max(FRAME, REST * this.cost));
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = 0;
    const begun = performance.now();
    const follow = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 48;
    if (this.reasoning) this.drawThinking();
    if (this.growing) this.growing.show(this.content);
    else this.body.textContent = this.content;
    if (follow) this.log.scrollTop = this.log.scrollHeight;
    this.cost = performance.now() - begun;
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

  /** An answer ended. */
  end(note, failed) {
    this.draw();
    if (this.thinking) this.thinking.firstChild.textContent = "Thoughts";
    this.footer.textContent = note;
    this.footer.classList.toggle("failed", failed);
    this.element.setAttribute("aria-busy", "false");
    this.log.scrollTop = this.log.scrollHeight;
  }

  /** It stays to be read, but is no part of the conversation. */
  retire() {
    this.element.classList.add("retired");
    this.actions.remove();
  }

  remove() {
    clearTimeout(this.timer);
    this.element.remove();
  }

  /** Puts a field in the place of the text; `done` gets what was written there if it is to be kept. */
  edit(done) {
    if (this.editor) return this.editor.querySelector("textarea").focus();
    this.editor = append(this.element, "form", "editor");
    this.body.after(this.editor);
    const field = append(this.editor, "textarea", "");
    field.setAttribute("aria-label", this.role === "user" ? "Edit your message" : "Edit the answer");
    field.value = this.content;
    field.rows = Math.min(20, this.content.split("\n").length + 1);
    const buttons = append(this.editor, "div", "buttons");
    appendButton(buttons, "Cancel").addEventListener("click", () => this.cancelEdit());
    const save = appendButton(buttons, this.role === "user" ? "Send" : "Save");
    save.type = "submit";
    save.className = "primary";
    this.editor.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = field.value.trim();
      if (!text) return;
      this.endEdit();
      done(text);
    });
    this.editor.addEventListener("keydown", (event) => this.editorKey(event));
    this.body.hidden = this.actions.hidden = true;
    field.focus();
  }

  /** Enter sends a message, as below; an answer has lines, so it is saved with Ctrl+Enter. */
  editorKey(event) {
    if (event.isComposing) return;
    const enter = event.key === "Enter" && event.target.tagName === "TEXTAREA" && !event.shiftKey;
    if (enter && (this.role === "user" || event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      this.editor.requestSubmit();
    } else if (event.key === "Escape") {
      event.preventDefault();
      this.cancelEdit();
    }
  }

  cancelEdit() {
    this.endEdit();
    this.actions.querySelector("[data-action=edit]").focus();
  }

  /** Shows the text again, if it is being edited. */
  endEdit() {
    this.editor?.remove();
    this.editor = null;
    this.body.hidden = this.actions.hidden = false;
  }

  /** Another text in the place of this one. */
  replace(text) {
    this.content = text;
    this.reasoning = "";
    this.thinking?.remove();
    this.thinking = null;
    this.footer.textContent = this.role === "assistant" ? "Edited." : "";
    this.footer.classList.remove("failed");
    this.draw();
  }
}
