// What a model writes is text: nothing in it is run or fetched, and no text makes the page slow or wrong.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { Visit, startBrowser, startServer, streamOf } from "./support.mjs";

let browser;
let server;
before(async () => {
  browser = await startBrowser();
  server = await startServer();
});
after(async () => {
  await browser?.close();
  await server?.stop();
});

/** Shows an answer that comes in these pieces. */
async function show(...pieces) {
  const visit = await Visit.to(browser, server, { answer: () => streamOf(...pieces) });
  await visit.send("Say something bad.");
  await visit.done();
  return visit;
}

/** Runs in the page: what is there that must not be. */
function dangers() {
  const text = document.querySelector(".message.assistant");
  const elements = [...text.querySelectorAll("*")];
  return {
    hacked: String(window.hacked),
    elements: elements.filter((element) => /^(script|img|iframe|object|embed|style|link|svg|form|input|meta)$/i.test(element.tagName))
      .map((element) => element.tagName),
    handlers: elements.flatMap((element) => [...element.attributes]).filter(({ name }) => name.startsWith("on")).map(({ name }) => name),
    links: [...text.querySelectorAll("a")].map((link) => link.protocol).filter((protocol) => !/^(https?|mailto):$/.test(protocol)),
  };
}

const NONE = { hacked: "undefined", elements: [], handlers: [], links: [] };

test("markup and Markdown are told apart", async () => {
  const visit = await show(
    { reasoning_content: "Hm, <i>so</i>." },
    '<img src=x onerror="window.hacked=1"> and **bold & ',
    "<b>** and `a < b`\n\n```html\n<script>window.hacked = 1</script>\n  x = **1**\n```\n",
    "- one\n- two\n\n3. three\n\nnaïve 🦀 [link](javascript:alert(1))",
  );
  const found = await visit.page.evaluate(() => {
    const text = document.querySelector(".message.assistant .text");
    const thinking = document.querySelector(".thinking");
    let parsed = "is possible";
    try {
      text.cloneNode().innerHTML = "<b>x</b>";
    } catch (error) {
      parsed = error.name;
    }
    return {
      parsed,
      tags: [...text.querySelectorAll("*")].map((element) => element.tagName.toLowerCase()).join(" "),
      code: text.querySelector("pre").textContent,
      bold: text.querySelector("strong").textContent,
      inline: text.querySelector("p code").textContent,
      items: [...text.querySelectorAll("li")].map((item) => item.textContent),
      text: text.textContent,
      folded: !thinking.open,
      thought: thinking.querySelector("div").textContent,
    };
  });
  assert.equal(found.parsed, "TypeError");
  assert.equal(found.tags, "p strong code figure figcaption span button pre code ul li li ol li p");
  assert.equal(found.code, "<script>window.hacked = 1</script>\n  x = **1**");
  assert.deepEqual([found.bold, found.inline], ["bold & <b>", "a < b"]);
  assert.deepEqual(found.items, ["one", "two", "three"]);
  assert.ok(found.text.includes('<img src=x onerror="window.hacked=1">'), found.text);
  assert.ok(found.text.includes("naïve 🦀 [link](javascript:alert(1))"), found.text);
  assert.deepEqual([found.folded, found.thought], [true, "Hm, <i>so</i>."]);
  assert.deepEqual(await visit.page.evaluate(dangers), NONE);
  assert.deepEqual(visit.complaints.filter((text) => !/TrustedHTML|trusted-types/.test(text)), []);
  await visit.close();
});

test("nothing is run or fetched", async () => {
  const bad = "javascript:window.hacked=1";
  const visit = await show([
    "<script>window.hacked=1</script>", "<img src=x onerror=window.hacked=1>", "<svg onload=window.hacked=1>",
    "<iframe src='javascript:parent.hacked=1'></iframe>", "<a href='javascript:window.hacked=1'>x</a>", "<style>*{display:none}</style>",
    `[a](${bad})`, `[a](<${bad}>)`, `[a]( ${bad} )`, `![a](${bad})`, `<${bad}>`, `[a](JAVASCRIPT:window.hacked=1)`,
    "[a](data:text/html,<script>1</script>)", '[a](https://a.example" onclick="window.hacked=1)', "[a](https://a.example 'x' onclick=1)",
    "![picture](https://a.example/p.png)", "[a](/flush_cache)", "[a](//a.example)", "`<script>`", "| <script>window.hacked=1</script> |\n|---|",
    "> <img src=x onerror=window.hacked=1>", "- <img src=x onerror=window.hacked=1>", "# <img src=x onerror=window.hacked=1>",
    '```"><img src=x onerror=window.hacked=1>\nx\n```', "**<img src=x onerror=window.hacked=1>**", "https://a.example/<script>",
    "[<img src=x onerror=window.hacked=1>](https://a.example)",
  ].join("\n\n"));
  assert.deepEqual(await visit.page.evaluate(dangers), NONE);
  const links = await visit.page.$$eval(".message a", (found) => found.map((link) => [link.target, link.rel]));
  assert.ok(links.length > 0 && links.every(([target, rel]) => target === "_blank" && rel.includes("noopener")), links.join());
  assert.deepEqual(visit.asked.filter((url) => !url.startsWith(server.url)), []);
  assert.deepEqual(visit.complaints, []);
  await visit.close();
});

test("large and deep texts are drawn", async () => {
  const row = `|${" a |".repeat(100)}`;
  const table = [row, `|${" - |".repeat(100)}`, ...Array(99).fill(row)].join("\n");
  const quotes = `${">".repeat(5000)} deep`;
  // In some hundred pieces, as a model writes.
  const text = `${quotes}\n\n${table}\n\n\`\`\`\nnever closed\n${"x = 1\n".repeat(2000)}`;
  const pieces = text.match(/[^]{1,300}/g);
  const visit = await show(...pieces);
  const found = await visit.page.evaluate(() => {
    const text = document.querySelector(".message.assistant .text");
    return [text.querySelectorAll("td, th").length, text.querySelectorAll("blockquote").length, text.querySelector("pre").textContent];
  });
  assert.equal(found[0], 10_000);
  assert.ok(found[1] > 0 && found[1] < 20, `${found[1]} quotes`);
  assert.ok(found[2].startsWith("never closed\nx = 1\n") && found[2].length > 12_000);
  assert.equal(await visit.page.evaluate(() => document.documentElement.scrollWidth), 1200);
  assert.deepEqual(visit.complaints, []);
  await visit.close();
});

test("a text that grows is drawn as if it came at once", async () => {
  const visit = await Visit.to(browser, server);
  const wrong = await visit.page.evaluate(async () => {
    const { GrowingText } = await import("/page/growing.js");
    const pieces = ["a", " b", "\n", "\n\n", "**", "*", "`", "```\n", "- ", "  - ", "1. ", "> ", "| a | b |\n", "|---|---|\n", "# ", "---\n",
      "[x](https://y.z)", "<b>", "~~~\n", "    ", "word "];
    let state = 11;
    const next = (below) => (state = (state * 1103515245 + 12345) % 2147483648) % below;
    const drawn = (texts) => {
      const element = document.createElement("div");
      const growing = new GrowingText(element);
      for (const text of texts) growing.show(text);
      return element.innerHTML;
    };
    for (let turn = 0; turn < 1500; turn += 1) {
      const text = Array.from({ length: 5 + next(40) }, () => pieces[next(pieces.length)]).join("");
      const cuts = Array.from({ length: text.length }, (_, end) => text.slice(0, end)).filter(() => next(3) > 0);
      if (drawn([...cuts, text]) !== drawn([text])) return text;
    }
    return null;
  });
  assert.equal(wrong, null);
  await visit.close();
});

test("what is complete is not drawn again", async () => {
  const visit = await Visit.to(browser, server);
  const kept = await visit.page.evaluate(async () => {
    const { GrowingText } = await import("/page/growing.js");
    const element = document.createElement("div");
    const growing = new GrowingText(element);
    growing.show("one\n\n| a |\n|---|\n| 1 |\n\n```\ncode");
    const before = [...element.children, element.querySelector("td"), element.querySelector("pre")];
    const text = element.querySelector("code").firstChild;
    growing.show("one\n\n| a |\n|---|\n| 1 |\n\n```\ncode\nmore");
    return before.every((node) => element.contains(node)) && element.contains(text) && text.data === "code\nmore";
  });
  assert.equal(kept, true);
  await visit.close();
});
