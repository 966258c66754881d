// The page in real Chromium, in front of a real model.

import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";

import { Visit, eventually, startBrowser, startServer, streamOf } from "./support.mjs";

/** An answer that goes on until it is stopped or full. */
const endless = (max_tokens) => () => ({ ignore_eos: true, max_tokens, temperature: 0 });
/** About 800 tokens, so that history is sealed at once. */
const LONG = Array.from({ length: 64 }, (_, index) => `Station ${index} is ${index * 7} kilometres away.`).join(" ");

let browser;
before(async () => {
  browser = await startBrowser();
});
after(() => browser?.close());

describe("without a key", () => {
  let server;
  before(async () => {
    server = await startServer();
  });
  after(() => server?.stop());

  test("it loads without complaint and asks nobody else", async () => {
    const visit = await Visit.to(browser, server);
    assert.equal(await visit.page.title(), "oscar");
    await eventually("the model is named", async () => (await visit.text("#model-name")) !== "");
    await eventually("the picture is there", async () => (await visit.picture()).figures[1] !== "");
    assert.equal(await visit.page.evaluate(() => document.activeElement.id), "message");
    const elsewhere = visit.asked.filter((url) => !url.startsWith(server.url));
    assert.deepEqual(elsewhere, []);
    assert.deepEqual(visit.complaints, []);
    await visit.close();
  });

  test("a message is answered bit by bit, with the keyboard alone", async () => {
    const visit = await Visit.to(browser, server, { edit: endless(120) });
    const { keyboard } = visit.page;
    await keyboard.type("Hello.");
    await keyboard.down("Shift");
    await keyboard.press("Enter");
    await keyboard.up("Shift");
    await keyboard.type("Who are you?");
    assert.equal(await visit.page.$eval("#message", (box) => box.value), "Hello.\nWho are you?");
    await keyboard.press("Enter");
    assert.equal(await visit.text(".message.user .text"), "Hello.\nWho are you?");
    const lengths = new Set();
    await eventually("the answer ends", async () => {
      lengths.add((await visit.answer()).length);
      return !/^Answering/.test(await visit.status());
    });
    assert.ok(lengths.size > 4, `seen at lengths ${[...lengths]}`);
    assert.equal(await visit.status(), "Done.");
    assert.match(await visit.text(".message.assistant footer"), /^120 tokens · .* prompt tokens from the cache · cut off/);
    assert.equal(await visit.page.$eval(".message.assistant", (element) => element.ariaBusy), "false");
    // Everything can be reached with Tab, and shows that it is.
    const reached = new Map();
    for (let step = 0; step < 24; step += 1) {
      await keyboard.press("Tab");
      const [id, outline] = await visit.page.evaluate(() => {
        const style = getComputedStyle(document.activeElement);
        return [document.activeElement.id || document.activeElement.dataset.action, style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth)];
      });
      reached.set(id, outline);
    }
    const all = ["new-chat", "settings-toggle", "cache-toggle", "theme", "log", "message", "send", "edit", "copy", "again", "continue"];
    for (const id of all) {
      assert.ok(reached.get(id) >= 1, `${id}: ${[...reached]}`);
    }
    assert.deepEqual(visit.complaints, []);
    await visit.close();
  });

  test("Esc stops an answer, and the engine with it", async () => {
    const visit = await Visit.to(browser, server, { edit: endless(3500) });
    await visit.send("Tell me a long story.");
    await eventually("it answers", async () => (await visit.answer()).length > 20);
    assert.equal((await server.cache()).running, 1);
    await visit.page.keyboard.press("Escape");
    await eventually("the page says so", async () => (await visit.status()) === "Stopped.");
    await eventually("the engine is at rest", async () => {
      const cache = await server.cache();
      return cache.running + cache.prefilling + cache.queued === 0 && cache.requests.length === 0;
    });
    const said = await visit.answer();
    assert.ok(said.length > 20);
    await eventually("its strip is gone", async () => (await visit.picture()).strips === 0);
    // What was said so far is part of the conversation.
    await visit.send("Go on.");
    await eventually("it answers again", async () => (await visit.page.$$(".message.assistant")).length === 2);
    await eventually("with words", async () => (await visit.answer()).length > 5);
    await visit.page.click("#stop");
    await eventually("the button stops too", async () => (await visit.status()) === "Stopped.");
    await eventually("the engine is at rest", async () => (await server.cache()).running === 0);
    assert.deepEqual(visit.complaints, []);
    await visit.close();
  });

  test("the picture follows the pages of an answer", async () => {
    // Long enough that the page looks several times before it ends, however fast the machine is.
    const visit = await Visit.to(browser, server, { edit: endless(2500) });
    const before = await visit.picture();
    await visit.send(`${LONG} How far is station 12?`);
    const first = await eventually("its pages are shown", async () => {
      const picture = await visit.picture();
      return picture.request.includes("sealed") && picture;
    });
    assert.equal(first.request[0], "sink");
    assert.ok(first.request.includes("recent"), first.request.join());
    const format = await visit.page.$eval("#sealed-kind", (words) => words.textContent);
    assert.match(format, /^int2 \(2\.\d+ bits an element\)$/);
    const grown = await eventually("they become more", async () => {
      const picture = await visit.picture();
      return picture.request.length > first.request.length && picture;
    });
    const sealed = (picture) => picture.request.filter((cell) => cell.startsWith("sealed")).length;
    assert.ok(sealed(grown) >= sealed(first));
    await visit.screenshot("page-light");
    await visit.page.keyboard.press("Escape");
    await visit.done();
    // Between answers the tree has them, as many as the server says.
    await eventually("the tree keeps them", async () => {
      const [picture, { tree }] = [await visit.picture(), await server.cache()];
      return picture.strips === 0 && picture.tree.length > 0 && picture.tree.length === tree.pages + tree.tails;
    });
    // The second turn begins with pages that are there.
    await visit.send("And station 30?");
    const second = await eventually("shared pages are underlined", async () => {
      const picture = await visit.picture();
      return picture.request.some((cell) => cell.endsWith("shared")) && picture;
    });
    assert.notDeepEqual(second.figures, before.figures);
    await visit.page.keyboard.press("Escape");
    await visit.done();
    const cache = await server.cache();
    assert.ok(cache.cached_tokens > 600, `${cache.cached_tokens} tokens were found`);
    const shown = await eventually("the hit rate is the server's", async () => {
      const [rate] = (await visit.picture()).figures;
      return Math.abs(parseFloat(rate) / 100 - cache.hit_rate) <= 0.006 && rate;
    });
    assert.match(shown, /^\d+(\.\d)? %$/);
    assert.deepEqual(visit.complaints, []);
    await visit.close();
  });

  test("a refused request is explained, and the question comes back", async () => {
    const visit = await Visit.to(browser, server);
    await visit.set("system", "word ".repeat(20000));
    await visit.send("Hello?");
    await visit.done();
    assert.match(await visit.text(".message.assistant footer.failed"), /tokens/);
    assert.equal(await visit.page.$eval("#message", (box) => box.value), "Hello?");
    await visit.set("system", "");
    await visit.set("max_tokens", 8);
    await visit.page.keyboard.press("Enter");
    await visit.done();
    assert.equal(await visit.status(), "Done.");
    // A bad number is shown and not sent.
    await visit.set("temperature", "-1");
    const asked = visit.asked.length;
    await visit.send("Again?");
    assert.equal(await visit.page.evaluate(() => document.activeElement.id), "temperature");
    assert.ok(!visit.asked.slice(asked).some((url) => url.endsWith("completions")));
    await visit.close();
  });

  test("settings are sent and stay in the tab", async () => {
    const bodies = [];
    const note = (body) => (bodies.push(body), { max_tokens: 4 });
    const visit = await Visit.to(browser, server, { edit: note });
    await visit.set("temperature", "0.25");
    await visit.set("top_p", "");
    await visit.set("max_tokens", "77");
    await visit.set("seed", "5");
    await visit.set("system", "Be brief.");
    await visit.page.reload({ waitUntil: "networkidle2" });
    await visit.send("Hello");
    await visit.done();
    await visit.send("More");
    await visit.done();
    const [first, second] = bodies;
    assert.deepEqual([first.temperature, first.top_p, first.max_tokens, first.seed], [0.25, undefined, 77, 5]);
    assert.equal(first.model, await visit.text("#model-name"));
    assert.deepEqual(first.messages[0], { role: "system", content: "Be brief." });
    assert.deepEqual(second.messages.map((message) => message.role), ["system", "user", "assistant", "user"]);
    await visit.page.click("#new-chat");
    assert.equal((await visit.page.$$(".message")).length, 0);
    await visit.send("Anew");
    await visit.done();
    assert.equal(bodies[2].messages.length, 2);
    await visit.close();
  });

  test("an error in the middle of an answer is told", async () => {
    const body = `data: {"choices":[{"delta":{"content":"Half"}}]}\n\ndata: {"error":{"message":"it broke"}}\n\n`;
    const visit = await Visit.to(browser, server, { answer: () => ({ contentType: "text/event-stream", body }) });
    await visit.send("Hello");
    await visit.done();
    assert.equal(await visit.answer(), "Half");
    assert.equal(await visit.text(".message.assistant footer.failed"), "It broke.");
    await visit.close();
  });

  test("many long requests are drawn in bounds", async () => {
    const cache = await server.cache();
    const runs = [["sink", 1], ["sealed", 5000], ["recent", 4], ["filling", 1]];
    const request = { choice: 0, tokens: 5006 * 64 - 1, cached_tokens: 64 * 2500, shared_pages: 2500, runs };
    cache.requests = Array.from({ length: 40 }, (_, index) => ({ ...request, request: index + 1 }));
    Object.assign(cache.tree, { pages: 100_000, tails: 3000, warm: 50 });
    Object.assign(cache.pools.sealed, { pages: 200_000, free: 100_000, tree: 99_000, shared: 0 });
    const visit = await Visit.to(browser, server, { width: 360, height: 640, cache });
    await visit.page.click("#cache-toggle");
    const picture = await eventually("it is drawn", async () => {
      const picture = await visit.picture();
      return picture.strips > 0 && picture;
    });
    assert.equal(picture.strips, 12);
    assert.match(await visit.text("#requests"), /and 28 more$/);
    assert.ok(Math.max(picture.request.length, picture.tree.length) <= 180);
    // What is few is drawn page by page, what is many in groups, and half of them underlined.
    const ends = [picture.request[0], ...picture.request.slice(-5)];
    assert.deepEqual(ends, ["sink shared", "recent", "recent", "recent", "recent", "filling"]);
    const shared = picture.request.filter((cell) => cell === "sealed shared").length;
    assert.ok(Math.abs(shared / (picture.request.length - 6) - 0.5) < 0.02, `${shared} are underlined`);
    assert.match(await visit.text("#requests .strip p"), /5,000 sealed.*2,500 shared.*up to 32 pages/);
    assert.equal(await visit.page.evaluate(() => document.documentElement.scrollWidth), 360);
    assert.deepEqual(visit.complaints, []);
    await visit.close();
  });

  test("on a phone nothing is wider than the screen", async () => {
    const visit = await Visit.to(browser, server, { width: 360, height: 640, answer: () => streamOf("x".repeat(400)) });
    const fits = async (where) => {
      const [width, reachable] = await visit.page.evaluate(() => [
        document.documentElement.scrollWidth,
        [...document.querySelectorAll("nav button, #composer *")].every((element) => {
          const box = element.getBoundingClientRect();
          return element.hidden || (box.left >= 0 && box.right <= innerWidth && box.top >= 0 && box.bottom <= innerHeight);
        }),
      ]);
      assert.equal(width, 360, where);
      assert.ok(reachable, where);
    };
    await fits("at the start");
    assert.equal(await visit.page.$eval("#cache", (panel) => panel.hidden), true);
    await visit.send("y".repeat(300));
    await visit.done();
    await fits("with long lines");
    await visit.page.click("#cache-toggle");
    await eventually("the picture is there", async () => (await visit.picture()).tree.length > 0);
    await fits("with the cache");
    await visit.screenshot("page-phone");
    await visit.page.click("#settings-toggle");
    assert.equal(await visit.page.$eval("#cache", (panel) => panel.hidden), true);
    await fits("with settings");
    await visit.screenshot("page-phone-settings");
    await visit.close();
  });

  for (const scheme of ["light", "dark"]) {
    test(`${scheme} has contrast`, async () => {
      const visit = await Visit.to(browser, server, { scheme, edit: endless(200) });
      await visit.page.click("#settings-toggle");
      await visit.send("What is a page?");
      await visit.done();
      await eventually("the picture is there", async () => (await visit.picture()).tree.length > 0);
      const found = await visit.page.evaluate(contrasts);
      for (const [what, ratio, least] of found) assert.ok(ratio >= least, `${what}: ${ratio.toFixed(2)}`);
      assert.equal(found[0][3] < 0.5, scheme === "dark");
      await visit.screenshot(`page-all-${scheme}`);
      assert.deepEqual(visit.complaints, []);
      await visit.close();
    });
  }

  test("a picture in the dark", async () => {
    const visit = await Visit.to(browser, server, { scheme: "dark", edit: endless(2500) });
    await visit.send(`${LONG} Which station is nearest?`);
    await eventually("its pages are shown", async () => (await visit.picture()).request.length > 5);
    await eventually("it answers", async () => (await visit.answer()).length > 100);
    await visit.screenshot("page-dark");
    await visit.page.keyboard.press("Escape");
    await visit.done();
    await visit.close();
  });
});

describe("with a key", () => {
  let server;
  before(async () => {
    server = await startServer("--api-key", "the-key");
  });
  after(() => server?.stop());

  test("the page asks for it and keeps it in the tab", async () => {
    const visit = await Visit.to(browser, server);
    const { keyboard } = visit.page;
    const asks = () => visit.page.$eval("#key-dialog", (dialog) => dialog.open);
    await eventually("it asks", asks);
    assert.equal(await visit.page.evaluate(() => document.activeElement.id), "api-key");
    const looks = () => visit.asked.filter((url) => url.endsWith("/oscar/cache")).length;
    assert.equal(looks(), 0);
    await visit.screenshot("page-key");
    await keyboard.type("wrong");
    await keyboard.press("Enter");
    await eventually("it asks again", async () => visit.asked.filter((url) => url.endsWith("/models")).length === 2 && asks());
    assert.match(await visit.text("#key-notice"), /refused/);
    // Whoever closes it is asked again when something needs the key.
    await keyboard.press("Escape");
    assert.equal(await asks(), false);
    await visit.send("Hello");
    await visit.done();
    await eventually("it asks again", asks);
    assert.equal(await visit.page.$eval("#message", (box) => box.value), "Hello");
    await keyboard.type("the-key");
    await keyboard.press("Enter");
    await eventually("the model is named", async () => (await visit.text("#model-name")) !== "");
    await eventually("the picture is there", async () => (await visit.picture()).figures[1] !== "");
    await visit.set("max_tokens", 12);
    await visit.page.focus("#message");
    await keyboard.press("Enter");
    await visit.done();
    assert.equal(await visit.status(), "Done.");
    assert.equal((await server.cache("the-key")).running, 0);
    await visit.page.reload({ waitUntil: "networkidle2" });
    await eventually("it is still known", async () => (await visit.text("#model-name")) !== "");
    assert.equal(await visit.page.evaluate(() => localStorage.length), 0);
    assert.ok(!visit.asked.some((url) => url.includes("the-key")));
    assert.equal(await visit.page.$eval("#key-open", (button) => button.hidden), false);
    // Another tab knows nothing of it.
    const other = await Visit.to(browser, server);
    await eventually("it asks", () => other.page.$eval("#key-dialog", (dialog) => dialog.open));
    await other.close();
    await visit.close();
  });
});

/** Runs in the page: contrast of texts and of the cells, and how bright the ground is. */
function contrasts() {
  const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const luminance = (colour) => {
    probe.clearRect(0, 0, 1, 1);
    probe.fillStyle = colour;
    probe.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...probe.getImageData(0, 0, 1, 1).data].map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (colour !== "rgba(0, 0, 0, 0)") return colour;
    }
    return "Canvas";
  };
  const ratio = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const ground = luminance(getComputedStyle(document.body).backgroundColor);
  const list = [["body", ratio(getComputedStyle(document.body).color, behind(document.body)), 7, ground]];
  const texts = [".message.user .text", ".message footer", ".actions button", "#status", "#figures dt", ".strip p", ".pool p", "#send",
    "#new-chat", "#settings-form label", "#temperature", "#settings .note"];
  for (const text of texts) {
    const element = document.querySelector(text);
    list.push([text, ratio(getComputedStyle(element).color, behind(element)), 4.5, ground]);
  }
  const swatch = document.body.appendChild(document.createElement("span"));
  for (const name of ["--sink", "--sealed", "--recent", "--accent"]) {
    swatch.style.color = `var(${name})`;
    list.push([name, ratio(getComputedStyle(swatch).color, behind(document.body)), 3, ground]);
  }
  return list;
}
