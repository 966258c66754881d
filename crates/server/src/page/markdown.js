// A small part of Markdown: fenced code, headings, lists, bold and inline code.
//
// What a model writes is never parsed as HTML: elements are made one by one and filled with text.

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const ITEM = /^( *)(?:([-*+])|(\d{1,9})[.)]) +(\S.*)$/;
const HEADING = /^ {0,3}#{1,6} +(\S.*)$/;
const DEEPEST = 3;

/** Cuts a text into blocks: code, headings, list items that belong together, paragraphs. */
export function blocksOf(text) {
  const blocks = [];
  let fence = null;
  let open = null;
  const push = (block) => {
    blocks.push(block);
    return block;
  };
  for (const raw of text.split("\n")) {
    const line = raw.replaceAll("\t", "    ").trimEnd();
    if (fence) {
      const close = FENCE.exec(line);
      if (close && close[1][0] === fence[0] && close[1].length >= fence.length && !close[2].trim()) fence = null;
      else open.lines.push(raw);
      continue;
    }
    const opened = FENCE.exec(line);
    const item = ITEM.exec(line);
    const heading = HEADING.exec(line);
    if (opened) {
      fence = opened[1];
      open = push({ kind: "code", lines: [] });
    } else if (!line) {
      // A list goes on after an empty line if another item comes.
      if (open?.kind !== "list") open = null;
    } else if (item) {
      const level = Math.min(Math.floor(item[1].length / 2), DEEPEST);
      const ordered = item[3] !== undefined;
      const same = open?.kind === "list" && open.level === level && open.ordered === ordered;
      if (!same) open = push({ kind: "list", level, ordered, first: Number(item[3] ?? 1), lines: [] });
      open.lines.push(item[4]);
    } else if (heading) {
      push({ kind: "heading", lines: [heading[1]] });
      open = null;
    } else if (open?.kind === "list" && line.startsWith("  ")) {
      open.lines[open.lines.length - 1] += `\n${line.trim()}`;
    } else {
      if (open?.kind !== "paragraph") open = push({ kind: "paragraph", lines: [] });
      open.lines.push(line);
    }
  }
  return blocks;
}

function elementOf(block) {
  switch (block.kind) {
    case "code": {
      const pre = document.createElement("pre");
      pre.tabIndex = 0;
      pre.appendChild(document.createElement("code")).textContent = block.lines.join("\n");
      return pre;
    }
    case "list": {
      const list = document.createElement(block.ordered ? "ol" : "ul");
      if (block.ordered) list.start = block.first;
      if (block.level) list.className = `level-${block.level}`;
      for (const line of block.lines) appendInline(list.appendChild(document.createElement("li")), line);
      return list;
    }
    case "heading": {
      const heading = document.createElement("p");
      appendInline(heading.appendChild(document.createElement("strong")), block.lines[0]);
      return heading;
    }
    default: {
      const paragraph = document.createElement("p");
      appendInline(paragraph, block.lines.join("\n"));
      return paragraph;
    }
  }
}

/** Text with bold and code. Scans forward only, so that no text can make it slow. */
function appendInline(parent, text) {
  const hopeless = new Set();
  let plain = 0;
  let at = 0;
  const flush = (end) => {
    if (end > plain) parent.append(text.slice(plain, end));
  };
  while (at < text.length) {
    const mark = markAt(text, at);
    if (!mark) {
      at += 1;
      continue;
    }
    const end = hopeless.has(mark) ? -1 : closing(text, mark, at + mark.length);
    if (end < 0) {
      hopeless.add(mark);
      at += mark.length;
      continue;
    }
    flush(at);
    const inner = text.slice(at + mark.length, end);
    if (mark === "**") appendInline(parent.appendChild(document.createElement("strong")), inner);
    else parent.appendChild(document.createElement("code")).textContent = inner;
    at = plain = end + mark.length;
  }
  flush(text.length);
}

/** The mark that begins here: a run of backticks, or two asterisks before a word. */
function markAt(text, at) {
  if (text[at] === "`") {
    let end = at;
    while (text[end] === "`") end += 1;
    return text.slice(at, end);
  }
  return text.startsWith("**", at) && /\S/.test(text[at + 2] ?? " ") && text[at + 2] !== "*" ? "**" : null;
}

/** Where the mark comes again, as a run of the same length. */
function closing(text, mark, from) {
  let at = text.indexOf(mark, from);
  while (at >= 0) {
    let end = at;
    while (text[end] === mark[0]) end += 1;
    if (end - at === mark.length) return at;
    at = text.indexOf(mark, end);
  }
  return -1;
}

/** A growing text in an element. Blocks that did not change stay as they are. */
export class GrowingText {
  constructor(element) {
    this.element = element;
    this.sources = [];
  }

  show(text) {
    const blocks = blocksOf(text);
    const sources = blocks.map((block) => JSON.stringify(block));
    let same = 0;
    while (same < sources.length && sources[same] === this.sources[same]) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    for (const block of blocks.slice(same)) this.element.appendChild(elementOf(block));
    this.sources = sources;
  }
}
