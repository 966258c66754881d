// Marks within a text of Markdown: code, emphasis, links. Gives plain nodes, never HTML.
//
// One pass with a short stack of marks that may still close, so that no text can make it slow or deep.

const MARK = /[\\`*_~[\]<]|!\[|\bhttps?:\/\//gi;
const RUN = /([`*_~])\1*/y;
const TARGET = /\]\(\s?<?((?:[^\s()<>]|\([^\s()<>]*\))*)>?(?:\s"[^"]*")?\s?\)/y;
/** Marks that are whole by themselves, and the node of each; none if it is text after all. */
const WHOLE = [
  [/\\([!-/:-@[-`{-~])/y, (character) => character],
  [/(<br *\/?>)/iy, () => ({ tag: "br", children: [] })],
  [/<((?:https?:\/\/|mailto:)[^\s<>]+)>/iy, (target) => link(target, [target.replace(/^mailto:/i, "")])],
  [/(https?:\/\/[^\s<>[\]"`|]*[^\s<>[\]"`|'.,;:!?*_~)])/iy, (target) => link(target, [target])],
];
/** Marks that may be open at a time; the oldest is given up for another one. */
const MOST_OPEN = 32;

/** The nodes of a text. */
export function inline(text) {
  return new Scanner(text).scan();
}

/** A link's target if following it can do no more than open a page or a mail; else null. */
export function safeTarget(target) {
  return /^(?:https?:\/\/[^\s/]|mailto:[^\s])/i.test(target) && !/[\p{Cc}\\]/u.test(target) ? target : null;
}

function link(href, children) {
  if (!safeTarget(href)) return null;
  const attributes = { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" };
  return { tag: "a", attributes, children: children.flatMap((child) => (child.tag === "a" ? child.children : [child])) };
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
    // `open` has marks that may still close: what they are, how long, and where they stand in `nodes`; `lonely` has
    // lengths of runs of backticks that do not come again.
    Object.assign(this, { text, at: 0, nodes: [], open: [], lonely: new Set() });
  }

  scan() {
    for (;;) {
      MARK.lastIndex = this.at;
      const found = MARK.exec(this.text);
      this.take((found?.index ?? this.text.length) - this.at);
      if (!found) return joined(this.nodes);
      this.mark(found[0]);
    }
  }

  /** The next characters are a node, or text. */
  take(length, node = this.text.slice(this.at, this.at + length)) {
    this.nodes.push(node);
    this.at += length;
  }

  match(pattern) {
    pattern.lastIndex = this.at;
    return pattern.exec(this.text);
  }

  mark(mark) {
    if (mark.endsWith("[")) return this.begin(mark, mark.length);
    if (mark === "]") return this.endLink();
    const run = this.match(RUN)?.[0].length;
    if (mark === "`") return this.code(run);
    if (run) return this.emphasis(mark, run);
    for (const [pattern, make] of WHOLE) {
      const found = this.match(pattern);
      const node = found && make(found[1]);
      if (node) return this.take(found[0].length, node);
    }
    this.take(1);
  }

  code(length) {
    const from = this.at + length;
    const again = new RegExp(`(?<!\`)\`{${length}}(?!\`)`, "g");
    again.lastIndex = from;
    const end = this.lonely.has(length) ? null : again.exec(this.text);
    if (!end) {
      this.lonely.add(length);
      return this.take(length);
    }
    const inner = this.text.slice(from, end.index);
    const padded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim() !== "";
    this.take(end.index + length - this.at, { tag: "code", children: [padded ? inner.slice(1, -1) : inner] });
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

  /** A picture would be fetched from elsewhere, so it becomes a link too. */
  endLink() {
    const index = this.open.findLastIndex(({ mark }) => mark.endsWith("["));
    const [opened] = index < 0 ? [] : this.open.splice(index);
    const found = opened && this.match(TARGET);
    const target = found && safeTarget(found[1]);
    if (!target) return this.take(1);
    this.wrap(opened, opened.length, (children) => link(target, children.length ? children : [target]));
    this.at += found[0].length;
  }

  emphasis(mark, length) {
    const [before, after] = [this.text[this.at - 1] ?? " ", this.text[this.at + length] ?? " "];
    const inWord = (character) => mark === "_" && /[\p{L}\p{N}]/u.test(character);
    const fits = mark === "~" ? length === 2 : length <= 3;
    const left = fits && /\S/.test(before) && !inWord(after) ? this.close(mark, length) : length;
    if (left && fits && /\S/.test(after) && !inWord(before)) this.begin(mark, left);
    else this.take(left);
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
