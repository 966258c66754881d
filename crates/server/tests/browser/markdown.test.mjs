// Markdown as the page reads it, without a browser: nodes are written down as a person would read them.

import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { blocks } from "./page/blocks.js";
import { safeTarget } from "./page/inline.js";

/** Nodes as text: tags with their attributes around what is in them. Texts are quoted where they hold a bracket. */
function shown(nodes) {
  return nodes.map((node) => {
    if (typeof node === "string") return node.replaceAll("<", "&lt;");
    const { href, start, class: name } = node.attributes ?? {};
    const words = [node.tag, href, start, name].filter((word) => word !== undefined);
    return `<${words.join(" ")}>${shown(node.children)}</>`;
  }).join("");
}

const read = (text) => shown(blocks(text.split("\n")));

/** Every node of a text. */
function* all(nodes) {
  for (const node of nodes) {
    yield node;
    if (node.children) yield* all(node.children);
  }
}

function check(cases) {
  for (const [text, expected] of cases) assert.equal(read(text), expected, text);
}

describe("within a line", () => {
  test("emphasis", () => {
    check([
      ["a *b* **c** ***d*** ~~e~~", "<p>a <em>b</> <strong>c</> <em><strong>d</></> <del>e</></>"],
      ["**a *b* c**", "<p><strong>a <em>b</> c</></>"],
      ["_a_ __b__ snake_case_name __init__.py", "<p><em>a</> <strong>b</> snake_case_name <strong>init</>.py</>"],
      ["**注意：**文字", "<p><strong>注意：</>文字</>"],
      ["2 * 3 * 4, 2 ** 3, ~a~, ****, ____", "<p>2 * 3 * 4, 2 ** 3, ~a~, ****, ____</>"],
      ["*args and **kwargs", "<p>*args and **kwargs</>"],
      ["**not closed", "<p>**not closed</>"],
      ["\\*a\\* \\q", "<p>*a* \\q</>"],
    ]);
  });

  test("code", () => {
    check([
      ["`a < b` and ``c`d`` and `` ` ``", "<p><code>a &lt; b</> and <code>c`d</> and <code>`</></>"],
      ["`**a**` `[b](http://c.d)`", "<p><code>**a**</> <code>[b](http://c.d)</></>"],
      ["`open and ``two", "<p>`open and ``two</>"],
    ]);
  });

  test("links", () => {
    check([
      ["[a *b*](https://c.d/e \"title\")", "<p><a https://c.d/e>a <em>b</></></>"],
      ["[a](https://c.d/e_(f))", "<p><a https://c.d/e_(f)>a</></>"],
      ["see https://a.b/c_d?e=*f*.", "<p>see <a https://a.b/c_d?e=*f>https://a.b/c_d?e=*f</>*.</>"],
      ["<https://a.b> <mailto:a@b.c>", "<p><a https://a.b>https://a.b</> <a mailto:a@b.c>a@b.c</></>"],
      ["[https://a.b](https://c.d)", "<p><a https://c.d>https://a.b</></>"],
      ["![a cat](https://a.b/c.png) ![](https://a.b/d.png)",
        "<p><a https://a.b/c.png>a cat</> <a https://a.b/d.png>https://a.b/d.png</></>"],
      ["[1] and [a] (b) and [c](d", "<p>[1] and [a] (b) and [c](d</>"],
    ]);
  });

  test("targets that could do anything else are no links", () => {
    const bad = ["javascript:alert(1)", "JaVaScRiPt:alert(1)", " javascript:x", "java\tscript:x", "data:text/html,x",
      "vbscript:x", "file:///etc/passwd", "blob:x", "/flush_cache", "//evil.example", "#top", "", "http:", "https://",
      "http:\\\\evil.example", "https://a\u0000b", "\u0001javascript:x", "ftp://a.b", "view-source:http://a.b"];
    for (const target of bad) {
      assert.equal(safeTarget(target), null, target);
      for (const text of [`[a](${target})`, `[a](<${target}>)`, `<${target}>`, `![a](${target})`]) {
        const links = [...all(blocks([text]))].filter((node) => node.tag === "a");
        assert.deepEqual(links.filter((link) => safeTarget(link.attributes.href) === null), [], text);
        assert.ok(links.every((link) => link.attributes.rel.includes("noopener")), text);
      }
    }
    assert.equal(read("[a](javascript:alert(1))"), "<p>[a](javascript:alert(1))</>");
  });

  test("markup is text", () => {
    check([
      ["<script>alert(1)</script>", "<p>&lt;script>alert(1)&lt;/script></>"],
      ['<img src=x onerror="alert(1)">', '<p>&lt;img src=x onerror="alert(1)"></>'],
      ["a<br>b<br/>c", "<p>a<br></>b<br></>c</>"],
      ["&lt; &amp;", "<p>&lt; &amp;</>"],
    ]);
  });
});

describe("blocks", () => {
  test("headings, rules and paragraphs", () => {
    check([
      ["# A\n## B ##\n#hash\n####### seven", "<h3>A</><h4>B</><p>#hash\n####### seven</>"],
      ["a\nb\n\nc", "<p>a\nb</><p>c</>"],
      ["a\n---\n* * *\n___", "<p>a</><hr></><hr></><hr></>"],
    ]);
  });

  test("code", () => {
    check([
      ["```rust x\nfn a() {\n\tb\n}\n```\nc",
        "<figure code><figcaption><span>rust</><button copy>Copy</></><pre><code>fn a() {\n\tb\n}</></></><p>c</>"],
      ["~~~\n```\n~~~~", "<figure code><figcaption><span></><button copy>Copy</></><pre><code>```</></></>"],
      ["a\n```\n# never closed\n\n- x",
        "<p>a</><figure code><figcaption><span></><button copy>Copy</></><pre><code># never closed\n\n- x</></></>"],
      ["```inline``` code", "<p><code>inline</> code</>"],
    ]);
  });

  test("lists", () => {
    check([
      ["- a\n- *b*\n+ c", "<ul><li>a</><li><em>b</></><li>c</></>"],
      ["3. a\n4. b", "<ol 3><li>a</><li>b</></>"],
      ["- a\n  - b\n    - c\n- d", "<ul><li>a<ul><li>b<ul><li>c</></></></></><li>d</></>"],
      ["1. a\n   - b\n2. c\n\td", "<ol><li>a<ul><li>b</></></><li>c\nd</></>"],
      ["- a\n\n  b\n- c", "<ul><li><p>a</><p>b</></><li>c</></>"],
      ["- a\n\n- b", "<ul><li><p>a</></><li><p>b</></></>"],
      ["- a\nlazy\n\nafter", "<ul><li>a\nlazy</></><p>after</>"],
      ["So:\n1. a\n- b", "<p>So:</><ol><li>a</></><ul><li>b</></>"],
      ["In\n1986. What a year", "<p>In\n1986. What a year</>"],
      ["- [ ] a\n- [x] b", "<ul><li>☐ a</><li>☑ b</></>"],
      ["- a\n  ```\n  b\n    c\n  ```",
        "<ul><li>a<figure code><figcaption><span></><button copy>Copy</></><pre><code>b\n  c</></></></></>"],
    ]);
  });

  test("quotes", () => {
    check([
      ["> a\n> > b\n>\n> - c\n\nd", "<blockquote><p>a</><blockquote><p>b</></><ul><li>c</></></><p>d</>"],
      [">a\n>b", "<blockquote><p>a\nb</></>"],
    ]);
  });

  test("tables", () => {
    check([
      ["a | b\n--|:-:\n1 | 2 | 3\n4", "<div table><table><thead><tr><th>a</><th centre>b</></></><tbody><tr><td>1</>" +
        "<td centre>2</></></></></><p>4</>"],
      ["x\n| a |\n| -: |\n| **b** \\| c |", "<p>x</><div table><table><thead><tr><th right>a</></></><tbody><tr>" +
        "<td right><strong>b</> | c</></></></></>"],
      ["a | b\n--|--|--", "<p>a | b\n--|--|--</>"],
      ["| a |", "<p>| a |</>"],
    ]);
  });
});

describe("hostile texts", () => {
  const depth = (nodes) => 1 + Math.max(0, ...nodes.map((node) => (node.children ? depth(node.children) : 0)));

  test("nothing becomes deep", () => {
    const texts = ["> ".repeat(50_000), ">".repeat(50_000) + "a", "- ".repeat(20_000) + "a", "1. ".repeat(20_000) + "a",
      "*a **b ".repeat(10_000) + "c** d*".repeat(10_000), "[".repeat(50_000) + "](https://a.b)".repeat(10_000),
      Array.from({ length: 300 }, (_, index) => `${"  ".repeat(index)}- a`).join("\n")];
    for (const text of texts) assert.ok(depth(blocks(text.split("\n"))) < 120, text.slice(0, 20));
  });

  // A text that takes quadratic time takes minutes here, and the run has a limit.
  test("nothing becomes slow", { timeout: 60_000 }, () => {
    const parts = ["`", "``a` ", "*a ", "**a*", "_a_b", "~~a", "[", "[a](", "[a](b ", "](", "![", "<", "<http://", "http://",
      "http://a.", "\\", "|", "a|", "| - ", "# ", "   ", "\t", "1. ", "-\n", "> a\n", "```\n", "~~~\n", "|a|\n|-|\n", "a\n|-",
      '[a](b "', "[a]((", "* * ", "- - a\n", "((", "<br", "\n\n  "];
    for (const part of parts) for (const before of ["", "a ", "> ", "- ", "| a |\n| - |\n| "]) {
      blocks((before + part.repeat(100_000 / part.length)).split("\n"));
    }
    const run = (text) => text.repeat(100_000);
    for (const line of [`${run("`")}a\``, `\`\`\` ${run(" ")}\``, `# ${run(" ")}a`, `# ${run(" #")}a`, `[a](${run(" ")}b`, `[a](b ${run(" ")}`,
      `[a](${run("b")}`, `${run("- ")}a`, `${run("-")}a`, `|${run("-")}a|`, `http://a${run(".")}`, `*a${run(" ")}*`, `${run("1")}. a`]) {
      for (const before of ["", "- ", "> ", "a\n"]) blocks((before + line).split("\n"));
    }
  });

  test("a large table", () => {
    const row = `|${" a |".repeat(100)}`;
    const table = [row, `|${" - |".repeat(100)}`, ...Array(99).fill(row)];
    const found = [...all(blocks(table))].filter((node) => /^t[dh]$/.test(node.tag));
    assert.equal(found.length, 10_000);
    // Many columns and many rows of one bar do not multiply.
    const wide = [`|${"a|".repeat(5000)}`, `|${"-|".repeat(5000)}`, ...Array(5000).fill("|")];
    assert.ok([...all(blocks(wide))].length < 50_000);
  });

  test("only known tags and attributes, whatever the text", () => {
    const tags = new Set(["p", "h3", "h4", "h5", "h6", "hr", "ul", "ol", "li", "blockquote", "div", "table", "thead", "tbody",
      "tr", "th", "td", "figure", "figcaption", "span", "button", "pre", "code", "strong", "em", "del", "a", "br"]);
    const attributes = new Set(["class", "tabindex", "type", "start", "href", "title", "target", "rel"]);
    const pieces = ["a", " ", "\n", "\n\n", "*", "**", "_", "~~", "`", "```", "[", "](", ")", "<", ">", "- ", "1. ", "> ", "|",
      "|-|", "#", "\\", "!", "http://a", "javascript:", "<script>", "onerror=", '"', "\t", "🦀"];
    let state = 7;
    const next = (below) => (state = (state * 1103515245 + 12345) % 2147483648) % below;
    for (let turn = 0; turn < 3000; turn += 1) {
      const text = Array.from({ length: next(60) }, () => pieces[next(pieces.length)]).join("");
      for (const node of all(blocks(text.split("\n")))) {
        if (typeof node === "string") continue;
        assert.ok(tags.has(node.tag), `${node.tag}: ${text}`);
        for (const name of Object.keys(node.attributes ?? {})) assert.ok(attributes.has(name), `${name}: ${text}`);
        if (node.tag === "a") assert.ok(safeTarget(node.attributes.href), text);
      }
    }
  });
});
