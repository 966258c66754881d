// Blocks of Markdown: paragraphs, headings, lists, quotes, tables, code. Gives plain nodes, never HTML.
//
// Lines are looked at from first to last, and what a block is depends on its own lines and the one after.

import { inline } from "./inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: (.*))?$/;
const RULE = /^ {0,3}([-*_])(?: *\1){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|(\d{1,9})[.)])(?: +(?=\S)|$)/;
const DELIMITERS = /^ {0,3}\|? *:?-+:? *(?:\| *:?-+:? *)*\|?$/;
const TASK = /^\[([ xX])\] /;
/** Quotes and lists within each other; deeper ones are text. */
const DEEPEST = 8;

const node = (tag, children, attributes) => ({ tag, children, ...(attributes && { attributes }) });

/** The blocks of some lines, each with the number of its first line. */
export function blocks(lines, depth = 0) {
  return new Blocks(lines.map((line) => spaced(line).trimEnd()), lines, depth).all();
}

/** Spaces for tabs before the text. */
const spaced = (line) => line.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    "));
const indentOf = (line) => line.length - line.trimStart().length;
const dedent = (line, columns) => line.slice(Math.min(columns, indentOf(line)));

class Blocks {
  constructor(lines, raw, depth) {
    Object.assign(this, { lines, raw, depth, at: 0 });
  }

  all() {
    const found = [];
    while (this.at < this.lines.length) {
      const line = this.at;
      if (this.lines[line] === "") this.at += 1;
      else found.push({ ...this.block(this.lines[line]), line });
    }
    return found;
  }

  block(line) {
    if (FENCE.test(line)) return this.code(...FENCE.exec(line).slice(1));
    if (HEADING.test(line)) return this.heading(...HEADING.exec(line).slice(1));
    if (RULE.test(line)) return (this.at += 1), node("hr", []);
    if (this.depth < DEEPEST && QUOTE.test(line)) return this.quote();
    if (this.depth < DEEPEST && ITEM.test(line)) return this.list(ITEM.exec(line));
    return this.table() ?? this.paragraph();
  }

  code(fence, info) {
    const indent = indentOf(this.lines[this.at]);
    const from = (this.at += 1);
    const ends = (line) => /^ {0,3}[`~]+$/.test(line) && line.trim().startsWith(fence);
    while (this.at < this.lines.length && !ends(this.lines[this.at])) this.at += 1;
    const text = this.raw.slice(from, this.at).map((line) => dedent(line, indent));
    this.at += 1;
    const name = node("span", [info.trim().split(" ")[0]]);
    const copy = node("button", ["Copy"], { type: "button", class: "copy" });
    const pre = node("pre", [node("code", [text.join("\n")])], { tabindex: "0" });
    return node("figure", [node("figcaption", [name, copy]), pre], { class: "code" });
  }

  heading(marks, text) {
    this.at += 1;
    // The page has headings of its own above these.
    return node(`h${Math.min(marks.length + 2, 6)}`, inline((text ?? "").replace(/ #+$/, "").trim()));
  }

  quote() {
    const from = this.at;
    while (QUOTE.test(this.lines[this.at] ?? "")) this.at += 1;
    const inner = this.raw.slice(from, this.at).map((line) => spaced(line).replace(QUOTE, ""));
    return node("blockquote", blocks(inner, this.depth + 1));
  }

  list([, { length: base }, , first]) {
    const ordered = first !== undefined;
    const items = [];
    let spread = false;
    for (; this.at < this.lines.length; this.at += 1) {
      const line = this.lines[this.at];
      const item = ITEM.exec(line);
      const indent = indentOf(line);
      const blank = this.lines[this.at - 1] === "";
      if (line === "") items.at(-1).lines.push("");
      else if (indent >= base + 2 && items.length) {
        items.at(-1).lines.push(dedent(spaced(this.raw[this.at]), items.at(-1).indent));
      } else if (item && (item[3] !== undefined) === ordered && !RULE.test(line)) {
        spread ||= blank && items.length > 0;
        items.push({ indent: item[0].length, lines: [line.slice(item[0].length)] });
      } else if (!blank && !this.starts(this.at)) items.at(-1).lines.push(line);
      else break;
    }
    const attributes = ordered && first !== "1" ? { start: first } : undefined;
    return node(ordered ? "ol" : "ul", items.map(({ lines }) => this.item(lines, spread)), attributes);
  }

  item(lines, spread) {
    lines[0] = lines[0].replace(TASK, (_, mark) => (mark === " " ? "☐ " : "☑ "));
    const inner = blocks(lines, this.depth + 1);
    const loose = spread || inner.filter(({ tag }) => tag === "p").length > 1;
    return node("li", loose ? inner : inner.flatMap((block) => (block.tag === "p" ? block.children : [block])));
  }

  /** A table, if one begins here. */
  table() {
    if (!this.startsTable(this.at)) return null;
    const side = (cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "centre" : "right") : "");
    const classes = cells(this.lines[this.at + 1]).map(side);
    const row = (tag, line) =>
      node("tr", cells(line).slice(0, classes.length).map((cell, index) =>
        node(tag, inline(cell), classes[index] ? { class: classes[index] } : undefined)));
    const head = row("th", this.lines[this.at]);
    const body = [];
    for (this.at += 2; this.lines[this.at]?.includes("|"); this.at += 1) body.push(row("td", this.lines[this.at]));
    const parts = [node("thead", [head]), node("tbody", body)];
    return node("div", [node("table", parts)], { class: "table", tabindex: "0" });
  }

  startsTable(at) {
    const [head, rule = ""] = this.lines.slice(at, at + 2);
    return head.includes("|") && DELIMITERS.test(rule) && cells(head).length === cells(rule).length;
  }

  paragraph() {
    const from = this.at;
    do this.at += 1;
    while (this.at < this.lines.length && this.lines[this.at] !== "" && !this.starts(this.at));
    return node("p", inline(this.lines.slice(from, this.at).map((line) => line.trim()).join("\n")));
  }

  /** Whether a line begins a block although the line before belongs to a paragraph. */
  starts(at) {
    const line = this.lines[at];
    if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || this.startsTable(at)) return true;
    if (this.depth >= DEEPEST) return false;
    const item = ITEM.exec(line);
    // A year at the start of a line is no list.
    return QUOTE.test(line) || (item !== null && item[0].length < line.length && [undefined, "1"].includes(item[3]));
  }
}

/** The cells of a line of a table; a bar after a backslash is text. */
function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}
