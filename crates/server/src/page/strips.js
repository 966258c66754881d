// Rows of cells and bars: how pages and pools are drawn, and how numbers are written.

/** Cells of a strip; more would only be slow. Longer runs are drawn with several pages to a cell. */
const MOST_CELLS = 160;
/** Runs of so many pages always have a cell for each. */
const FEW = 8;

const numbers = new Intl.NumberFormat("en-GB");
export const count = (value) => numbers.format(value);
export const plural = (value, one, many) => `${count(value)} ${value === 1 ? one : many}`;
export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${value.toLocaleString("en-GB", { maximumSignificantDigits: 3 })} ${units[unit]}`;
}

/** Changes a text only where it differs, so that a selection in it survives. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A row of cells, one per page. */
export class Strip {
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
export class Pool {
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
