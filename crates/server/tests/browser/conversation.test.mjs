// What can be done with a conversation: stop, go on, ask again, edit, copy; and what the cache has of it.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { Visit, eventually, startBrowser, startServer, streamOf } from "./support.mjs";

const LAST = ".message.assistant:last-of-type";

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

/** A page whose answers are `answer 1`, `answer 2` and so on, with the requests it sends. */
async function counted(options) {
  const bodies = [];
  const answer = (body) => (bodies.push(body), streamOf(`answer ${bodies.length}`));
  const visit = await Visit.to(browser, server, { answer, ...options });
  return [visit, bodies];
}

const said = (body) => body.messages.map(({ role, content }) => `${role}: ${content}`);

test("an answer is asked for again", async () => {
  const [visit, bodies] = await counted();
  for (const question of ["one", "two", "three"]) {
    await visit.send(question);
    await visit.done();
  }
  await visit.press(LAST, "again");
  await visit.done();
  assert.deepEqual(said(bodies[3]), said(bodies[2]));
  assert.deepEqual(await visit.texts(), ["one", "answer 1", "two", "answer 2", "three", "answer 4"]);
  // What came after an earlier answer is forgotten with it.
  await visit.press(".message:nth-of-type(4)", "again");
  await visit.done();
  assert.deepEqual(said(bodies[4]), ["user: one", "assistant: answer 1", "user: two"]);
  assert.deepEqual(await visit.texts(), ["one", "answer 1", "two", "answer 5"]);
  assert.deepEqual(visit.complaints, []);
  await visit.close();
});

test("a question is edited, and the conversation goes on from there", async () => {
  const [visit, bodies] = await counted();
  const { keyboard } = visit.page;
  for (const question of ["one", "two"]) {
    await visit.send(question);
    await visit.done();
  }
  await visit.press(".message.user", "edit");
  assert.equal(await visit.page.evaluate(() => document.activeElement.value), "one");
  assert.notEqual(await visit.page.evaluate(() => document.activeElement.ariaLabel), null);
  // Escape leaves everything as it was.
  await keyboard.type("nothing");
  await keyboard.press("Escape");
  assert.deepEqual(await visit.texts(), ["one", "answer 1", "two", "answer 2"]);
  assert.equal(await visit.page.evaluate(() => document.activeElement.dataset.action), "edit");
  await keyboard.press("Enter");
  await keyboard.press("End");
  await keyboard.type(" and a half");
  await keyboard.down("Shift");
  await keyboard.press("Enter");
  await keyboard.up("Shift");
  await keyboard.type("<b>!");
  await keyboard.press("Enter");
  await eventually("it is sent", () => bodies.length === 3);
  await visit.done();
  assert.deepEqual(said(bodies[2]), ["user: one and a half\n<b>!"]);
  assert.deepEqual(await visit.texts(), ["one and a half\n<b>!", "answer 3"]);
  // Whoever goes on below while a message is being edited edits nothing.
  await visit.press(".message.user", "edit");
  await visit.send("three");
  await visit.done();
  assert.equal((await visit.page.$$(".editor")).length, 0);
  assert.deepEqual(await visit.texts(), ["one and a half\n<b>!", "answer 3", "three", "answer 4"]);
  assert.deepEqual(visit.complaints, []);
  await visit.close();
});

test("an answer is edited and continued", async () => {
  const [visit, bodies] = await counted();
  const { keyboard } = visit.page;
  for (const question of ["one", "two"]) {
    await visit.send(question);
    await visit.done();
  }
  await visit.press(".message.assistant", "edit");
  await keyboard.press("End");
  await keyboard.type(" **or**");
  await keyboard.press("Enter");
  await keyboard.type("so, ");
  await keyboard.down("Control");
  await keyboard.press("Enter");
  await keyboard.up("Control");
  assert.deepEqual(await visit.texts(), ["one", "answer 1 or\nso,"]);
  assert.equal(bodies.length, 2);
  await visit.press(LAST, "continue");
  await eventually("it is sent", () => bodies.length === 3);
  await visit.done();
  assert.deepEqual(said(bodies[2]), ["user: one", "assistant: answer 1 **or**\nso,"]);
  assert.equal(bodies[2].continue_final_message, true);
  assert.deepEqual(await visit.texts(), ["one", "answer 1 or\nso,answer 3"]);
  assert.equal(await visit.text(`${LAST} strong`), "or");
  await visit.send("three");
  await visit.done();
  assert.equal(bodies[3].continue_final_message, undefined);
  assert.equal(said(bodies[3])[1], "assistant: answer 1 **or**\nso,answer 3");
  assert.deepEqual(visit.complaints, []);
  await visit.close();
});

test("an answer that was stopped goes on where it was", async () => {
  const edit = () => ({ ignore_eos: true, max_tokens: 3000, temperature: 0 });
  const visit = await Visit.to(browser, server, { edit });
  await visit.send("Tell me a long story.");
  await eventually("it answers", async () => (await visit.answer()).length > 40);
  // There is nothing to press while it answers, except to stop.
  assert.equal(await visit.page.$eval(`${LAST} .actions`, (element) => getComputedStyle(element).visibility), "hidden");
  await visit.page.keyboard.press("Escape");
  await eventually("it stops", async () => (await visit.status()) === "Stopped.");
  const half = await visit.answer();
  await visit.press(LAST, "continue");
  await eventually("it goes on", async () => (await visit.answer()).length > half.length + 40);
  await visit.page.click("#stop");
  await eventually("it stops", async () => (await visit.status()) === "Stopped.");
  assert.ok((await visit.answer()).startsWith(half.trimEnd()));
  assert.equal((await visit.page.$$(".message")).length, 2);
  assert.deepEqual(visit.complaints, []);
  await visit.close();
});

test("answers and code are copied", async () => {
  const text = "Look:\n\n```rust\nfn main() {\n    a < b;\n}\n```\nand **that**";
  const visit = await Visit.to(browser, server, { answer: () => streamOf(text) });
  await visit.context.overridePermissions(server.url, ["clipboard-read", "clipboard-write", "clipboard-sanitized-write"]);
  await visit.page.bringToFront();
  await visit.send("Code");
  await visit.done();
  const copied = () => visit.page.evaluate(() => navigator.clipboard.readText());
  await visit.page.click(".code .copy");
  await eventually("it says so", async () => (await visit.text(".code .copy")) === "Copied");
  assert.equal(await copied(), "fn main() {\n    a < b;\n}");
  await visit.page.click(`${LAST} [data-action=copy]`);
  await eventually("it says so", async () => (await visit.text(`${LAST} [data-action=copy]`)) === "Copied");
  assert.equal(await copied(), text);
  // Without TLS browsers give pages no clipboard.
  await visit.page.evaluate(() => {
    window.copied = [];
    document.addEventListener("copy", () => window.copied.push(document.activeElement.value));
    navigator.clipboard.writeText = () => Promise.reject(new Error("not here"));
  });
  await visit.page.click(".code .copy");
  await eventually("it is copied", () => visit.page.evaluate(() => window.copied.length === 1));
  assert.deepEqual(await visit.page.evaluate(() => window.copied), ["fn main() {\n    a < b;\n}"]);
  assert.deepEqual(visit.complaints, []);
  await visit.close();
});

test("the cache shows the pages of this chat", async () => {
  // Marks of a turn's end would not be sent back, and what comes after them would not be found.
  const edit = () => ({ max_tokens: 200, temperature: 0 });
  const visit = await Visit.to(browser, server, { edit });
  const long = Array.from({ length: 50 }, (_, index) => `Town ${index} has ${index * 31} people.`).join(" ");
  assert.match(await eventually("it says nothing yet", () => visit.text("#own-bytes")), /Nothing/);
  await visit.send(`${long} Write a long story about these towns.`);
  const busy = await eventually("its pages are shown", async () => {
    const { own, request } = await visit.picture();
    return own.includes("sealed") && own.length === request.length && own;
  });
  assert.ok(busy[0].startsWith("sink") && busy.some((cell) => cell.startsWith("recent")), busy.join());
  await visit.done();
  const kept = await eventually("its pages are kept", async () => {
    const { own, strips } = await visit.picture();
    return strips === 0 && own.includes("warm") && own;
  });
  assert.ok(kept.length >= busy.length && kept.includes("sealed") && !kept.includes("evicted"), kept.join());
  const [, stored, exact] = /^([\d.]+) MiB stored, ([\d.]+) MiB in bf16/.exec(await visit.text("#own-bytes"));
  assert.ok(Number(stored) < Number(exact));
  await visit.screenshot("page-own");
  await fetch(`${server.url}/flush_cache`, { method: "POST" });
  await eventually("they are gone", async () => {
    const { own } = await visit.picture();
    return own.length === kept.length && own.every((cell) => cell === "evicted");
  });
  assert.match(await visit.text("#own-bytes"), /^0 B stored/);
  await visit.page.click("#new-chat");
  await eventually("a new chat has none", async () => /Nothing/.test(await visit.text("#own-bytes")));
  assert.deepEqual(visit.complaints, []);
  await visit.close();
});

test("colours follow the system until they are chosen", async () => {
  const visit = await Visit.to(browser, server, { scheme: "dark" });
  const bright = () => visit.page.evaluate(() => {
    const [red] = getComputedStyle(document.body).backgroundColor.match(/\d+/g).map(Number);
    return red > 127;
  });
  assert.equal(await bright(), false);
  const name = () => visit.text("#theme-name");
  assert.match(await name(), /system/);
  await visit.page.click("#theme");
  assert.deepEqual([await bright(), await name()], [true, "Colours: light"]);
  await visit.page.reload({ waitUntil: "networkidle2" });
  assert.equal(await bright(), true);
  await visit.page.click("#theme");
  assert.deepEqual([await bright(), await name()], [false, "Colours: dark"]);
  await visit.page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "light" }]);
  assert.equal(await bright(), false);
  await visit.page.click("#theme");
  assert.equal(await bright(), true);
  assert.equal(await visit.page.evaluate(() => localStorage.length), 0);
  assert.deepEqual(visit.complaints, []);
  await visit.close();
});
