// Marks within a text of Markdown: code, emphasis, links. Gives plain nodes, never HTML.
//
// One pass with a short stack of marks that may still close, so that no text can make it slow or deep.

const MARK = /[\\`*_~[\]<]|!\[|\bhttps?:\/\//gi;
const TARGET = /\(\s*<?((?:[^\s()<>]|\([^\s()<>]*\))*)>?(?:\s+"[^"]*")?\s*\)/y;
const IN_BRACKETS = /<(https?:\/\/[^\s<>]+|mailto:[^\s<>]+)>/iy;
const BREAK = /<br *\/?>/iy;
const BARE = /https?:\/\/[^\s<>[\]"`|]*[^\s<>[\]"`|'.,;:!?*_~)]/iy;
/** Marks that may be open at a time; the oldest is given up for another one. */
const MOST_OPEN = 32;
const LONGEST_RUN = 3;

/** The nodes of a text. */
export function inline(text) {
  return new Scanner(text).scan();
}

/** A link's target if following it can do no more than open a page or a mail; else null. */
export function safeTarget(target) {
  return /^(?:https?:\/\/[^\s/]|mailto:[^\s])/i.test(target) && !/[\p{Cc}\\]/u.test(target) ? target : null;
}

function link(href, children) {
  const text = children.flatMap((child) => (child.tag === "a" ? child.children : [child]));
  return { tag: "a", attributes: { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, children: text };
}

/** Neighbouring texts become one. */
function joined(nodes) {
  const whole = [];
  for (const node of nodes) {
    if (typeof node === "string" && typeof whole.at(-1) === "string") whole[whole.length - 1] += node;
    else if (node !== "") whole.push(node);
  }
  return whole;
}

class Scanner {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.nodes = [];
    /** Marks that may still close: what they are, how long, and where they stand in `nodes`. */
    this.open = [];
    /** Lengths of runs of backticks that do not come again. */
    this.lonely = new Set();
  }

  scan() {
    for (let found = this.seek(); found; found = this.seek()) {
      this.take(found.index - this.at);
      this.mark(found[0]);
    }
    this.take(this.text.length - this.at);
    return joined(this.nodes);
  }

  seek() {
    MARK.lastIndex = this.at;
    return MARK.exec(this.text);
  }

  /** The next characters are text. */
  take(length) {
    this.nodes.push(this.text.slice(this.at, this.at + length));
    this.at += length;
  }

  match(pattern, at = this.at) {
    pattern.lastIndex = at;
    return pattern.exec(this.text);
  }

  add(node, length) {
    this.nodes.push(node);
    this.at += length;
  }

  mark(mark) {
    const first = mark[0];
    if (first === "\\") this.escape();
    else if (first === "`") this.code();
    else if (first === "<") this.angle();
    else if (mark === "[" || mark === "![") this.begin(mark, mark.length);
    else if (first === "]") this.endLink();
    else if ("*_~".includes(first)) this.emphasis(first);
    else this.bareLink();
  }

  escape() {
    const escaped = /[!-/:-@[-`{-~]/.test(this.text[this.at + 1] ?? "");
    if (escaped) this.at += 1;
    this.take(1);
  }

  run() {
    let end = this.at;
    while (this.text[end] === this.text[this.at]) end += 1;
    return end - this.at;
  }

  code() {
    const length = this.run();
    const from = this.at + length;
    const end = this.lonely.has(length) ? -1 : closing(this.text, "`".repeat(length), from);
    if (end < 0) {
      this.lonely.add(length);
      return this.take(length);
    }
    const inner = this.text.slice(from, end);
    const padded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim() !== "";
    this.add({ tag: "code", children: [padded ? inner.slice(1, -1) : inner] }, end + length - this.at);
  }

  angle() {
    const found = this.match(IN_BRACKETS);
    const target = found && safeTarget(found[1]);
    if (target) return this.add(link(target, [target.replace(/^mailto:/i, "")]), found[0].length);
    const cut = this.match(BREAK);
    if (cut) return this.add({ tag: "br", children: [] }, cut[0].length);
    this.take(1);
  }

  bareLink() {
    const found = this.match(BARE);
    const target = found && safeTarget(found[0]);
    if (target) this.add(link(target, [target]), target.length);
    else this.take(1);
  }

  begin(mark, length) {
    if (this.open.length === MOST_OPEN) this.open.shift();
    this.open.push({ mark, length, node: this.nodes.length });
    this.take(length);
  }

  /** Makes what came after an open mark the children of a node. */
  wrap(opened, length, make) {
    const children = joined(this.nodes.splice(opened.node + 1));
    opened.length -= length;
    this.nodes[opened.node] = this.nodes[opened.node].slice(length);
    this.nodes.push(make(children));
  }

  endLink() {
    const index = this.open.findLastIndex(({ mark }) => mark.endsWith("["));
    const [opened] = index < 0 ? [] : this.open.splice(index);
    const found = opened && this.match(TARGET, this.at + 1);
    const target = found && safeTarget(found[1]);
    if (!target) return this.take(1);
    // A picture would be fetched from elsewhere, so it is a link too.
    this.wrap(opened, opened.length, (children) => link(target, children.length ? children : [target]));
    this.at += 1 + found[0].length;
  }

  emphasis(mark) {
    let length = this.run();
    const [before, after] = [this.text[this.at - 1] ?? " ", this.text[this.at + length] ?? " "];
    const inWord = (character) => mark === "_" && /[\p{L}\p{N}]/u.test(character);
    const fits = length <= LONGEST_RUN && (mark !== "~" || length === 2);
    if (fits && /\S/.test(before) && !inWord(after)) length = this.close(mark, length);
    if (length && fits && /\S/.test(after) && !inWord(before)) this.begin(mark, length);
    else this.take(length);
  }

  /** Closes open marks of this kind, and says how much of the run is left. */
  close(mark, length) {
    while (length > 0) {
      const index = this.open.findLastIndex((opened) => opened.mark === mark);
      if (index < 0) break;
      const opened = this.open[index];
      const used = Math.min(opened.length, length, 2);
      const tag = mark === "~" ? "del" : used === 2 ? "strong" : "em";
      this.wrap(opened, used, (children) => ({ tag, children }));
      this.open.length = opened.length > 0 ? index + 1 : index;
      this.at += used;
      length -= used;
    }
    return length;
  }
}

/** Where a run of backticks comes again with the same length. */
function closing(text, run, from) {
  for (let at = text.indexOf(run, from); at >= 0; ) {
    let end = at;
    while (text[end] === "`") end += 1;
    if (end - at === run.length) return at;
    at = text.indexOf(run, end);
  }
  return -1;
}
