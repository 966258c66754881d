// A growing text on the page. What is complete is drawn once; of the rest only what changed is drawn again.

import { blocks } from "./blocks.js";

/** Lines at the end that may still change what a block before them is: the unfinished one, and one looked ahead. */
const OPEN_LINES = 2;

/** A text of Markdown in an element. It may grow at its end; any other text begins anew. */
export class GrowingText {
  constructor(element) {
    this.element = element;
    this.clear();
  }

  clear() {
    this.element.replaceChildren();
    this.text = "";
    /** Where the first block begins that may still change, how many are before it, and it and those after. */
    this.from = 0;
    this.settled = 0;
    this.nodes = [];
  }

  show(text) {
    if (!text.startsWith(this.text)) this.clear();
    this.text = text;
    const lines = text.slice(this.from).split("\n");
    const nodes = blocks(lines);
    patch(this.element, this.nodes, nodes, this.settled);
    const next = nodes.findLastIndex(({ line }) => line < lines.length - OPEN_LINES);
    if (next > 0) {
      this.settled += next;
      for (const line of lines.slice(0, nodes[next].line)) this.from += line.length + 1;
      this.nodes = nodes.slice(next).map((block) => ({ ...block, line: block.line - nodes[next].line }));
    } else this.nodes = nodes;
  }
}

/** Makes the children of an element, from `skip` on, those that `next` describes; they are what `before` describes. */
function patch(element, before, next, skip = 0) {
  while (element.childNodes.length > skip + next.length) element.lastChild.remove();
  next.forEach((node, index) => {
    const old = before[index];
    const child = element.childNodes[skip + index];
    if (old === undefined) element.append(create(node));
    else if (typeof node === "string" && typeof old === "string") grow(child, old, node);
    else if (alike(old, node)) patch(child, old.children, node.children);
    else child.replaceWith(create(node));
  });
}

function grow(child, old, text) {
  if (text === old) return;
  if (text.startsWith(old)) child.appendData(text.slice(old.length));
  else child.data = text;
}

/** Whether two nodes differ at most in their children. */
function alike(one, other) {
  if (one.tag === undefined || one.tag !== other.tag) return false;
  return JSON.stringify(one.attributes) === JSON.stringify(other.attributes);
}

/** An element for a node. Texts become text and are never parsed. */
function create(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const element = document.createElement(node.tag);
  for (const [name, value] of Object.entries(node.attributes ?? {})) element.setAttribute(name, value);
  for (const child of node.children) element.append(create(child));
  return element;
}
