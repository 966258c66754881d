// A running `oscar serve`, a real browser, and what a user does with both.

import { spawn } from "node:child_process";
import { mkdirSync, rmSync } from "node:fs";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";

import puppeteer from "puppeteer-core";

const START_MS = 120_000;
const WAIT_MS = 60_000;

/** Starts a server and resolves when it is ready. */
export async function startServer(...flags) {
  const binary = process.env.OSCAR_BINARY ?? "target/release/oscar";
  const model = process.env.OSCAR_TEST_MODEL ?? "smollm2";
  const process_ = spawn(
    binary,
    ["serve", model, "--port", "0", "--context-length", "4096", "--kv-memory", "512MiB", ...flags],
    { stdio: ["ignore", "ignore", "pipe"] },
  );
  let log = "";
  const url = await new Promise((resolve, reject) => {
    const late = setTimeout(() => reject(new Error(`the server did not start:\n${log}`)), START_MS);
    process_.stderr.setEncoding("utf8").on("data", (text) => {
      log += text;
      const ready = /is ready at (http:\/\/\S+)/.exec(log);
      if (ready) {
        clearTimeout(late);
        resolve(ready[1]);
      }
    });
    process_.on("error", reject);
    process_.on("exit", (code) => reject(new Error(`the server ended with ${code}:\n${log}`)));
  });
  return {
    url,
    /** The cache as the page's picture gets it. */
    async cache(key) {
      const response = await fetch(`${url}/oscar/cache`, { headers: key ? { authorization: `Bearer ${key}` } : {} });
      return response.json();
    },
    async stop() {
      const ended = new Promise((resolve) => process_.on("exit", resolve));
      process_.kill("SIGTERM");
      const code = await ended;
      if (code !== 0 || log.includes("panicked")) throw new Error(`the server ended with ${code}:\n${log}`);
    },
  };
}

/** Starts the browser. A start that fails is told and tried again: a busy machine is not a broken page. */
export async function startBrowser() {
  const args = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--font-render-hinting=none"];
  const own = process.env.OSCAR_CHROMIUM;
  for (let left = 2; ; left -= 1) {
    const executablePath = own ?? (await unpackedBrowser());
    try {
      return await puppeteer.launch({ args, executablePath, headless: own ? true : "shell", timeout: START_MS });
    } catch (error) {
      console.error(`the browser at ${executablePath} did not start: ${error.stack}`);
      if (own || left === 0) throw error;
      rmSync(executablePath, { force: true });
      await sleep(2000);
    }
  }
}

/** Only the binary: the package's own flags put all tabs into one process, which ends with the first of them. */
async function unpackedBrowser() {
  const { default: chromium } = await import("@sparticuz/chromium");
  return chromium.executablePath();
}

/** The page in a tab of its own, with what went wrong in it. */
export class Visit {
  static async to(browser, server, { width = 1200, height = 800, scheme = "light", edit, answer, cache } = {}) {
    // A context of its own has storage of its own.
    const context = await browser.createBrowserContext();
    const page = await context.newPage();
    const visit = new Visit(context, page, server);
    await page.setViewport({ width, height });
    await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
    page.on("console", (message) => {
      if (["error", "warn", "warning"].includes(message.type())) visit.complaints.push(message.text());
    });
    page.on("pageerror", (error) => visit.complaints.push(String(error)));
    page.on("request", (request) => visit.asked.push(request.url()));
    await page.evaluateOnNewDocument(() => {
      document.addEventListener("securitypolicyviolation", (event) => {
        console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`);
      });
    });
    if (edit || answer || cache) await visit.intercept(edit, answer, cache);
    await page.goto(server.url, { waitUntil: "networkidle2" });
    return visit;
  }

  constructor(context, page, server) {
    Object.assign(this, { context, page, server, complaints: [], asked: [] });
  }

  /** Changes what the page sends to the chat route, or answers in the server's place. */
  async intercept(edit, answer, cache) {
    await this.page.setRequestInterception(true);
    this.page.on("request", (request) => {
      if (cache && request.method() === "GET" && request.url().endsWith("/oscar/cache")) {
        return request.respond({ contentType: "application/json", body: JSON.stringify(cache) });
      }
      if (!request.url().endsWith("/v1/chat/completions") || (!edit && !answer)) return request.continue();
      const body = JSON.parse(request.postData());
      if (answer) return request.respond(answer(body));
      return request.continue({ postData: JSON.stringify({ ...body, ...edit(body) }) });
    });
  }

  /** Writes a message and presses Enter. Long ones are pasted. */
  async send(text) {
    await this.page.focus("#message");
    if (text.length > 200) await this.page.$eval("#message", (box, value) => (box.value = value), text);
    else await this.page.keyboard.type(text);
    await this.page.keyboard.press("Enter");
  }

  async set(name, value) {
    await this.page.$eval(
      `#settings-form [name=${name}]`,
      (field, value) => {
        field.value = value;
        field.dispatchEvent(new Event("change", { bubbles: true }));
      },
      String(value),
    );
  }

  text(selector) {
    return this.page.$eval(selector, (element) => element.textContent);
  }

  answer() {
    return this.text(".message.assistant:last-of-type .text");
  }

  status() {
    return this.text("#status");
  }

  async done() {
    await eventually("the answer ends", async () => !/^Answering/.test(await this.status()));
  }

  /** Presses a button of a message. */
  async press(selector, action) {
    await this.page.$eval(`${selector} [data-action=${action}]`, (button) => button.click());
  }

  /** Texts of all messages. */
  texts() {
    return this.page.$$eval(".message .text", (texts) => texts.map((text) => text.textContent));
  }

  /** What the picture shows: classes of the cells of the first request, and of the tree. */
  picture() {
    return this.page.evaluate(() => {
      const classes = (selector) => [...document.querySelectorAll(selector)].map((cell) => cell.className.slice(5));
      return {
        request: classes("#requests .strip:first-child .cell"),
        own: classes("#own .cell"),
        strips: document.querySelectorAll("#requests .strip").length,
        tree: classes("#tree .cell"),
        figures: [...document.querySelectorAll("#figures dd:not(.small)")].map((figure) => figure.textContent),
      };
    });
  }

  async screenshot(name) {
    const folder = process.env.OSCAR_SCREENSHOTS;
    if (!folder) return;
    mkdirSync(folder, { recursive: true });
    await this.page.screenshot({ path: join(folder, `${name}.png`) });
  }

  async close() {
    await this.context.close();
  }
}

/** An answer in the server's place, in pieces. */
export function streamOf(...pieces) {
  const deltas = pieces.map((piece) => (typeof piece === "string" ? { content: piece } : piece));
  const events = deltas.map((delta) => `data: ${JSON.stringify({ choices: [{ index: 0, delta }] })}\n\n`);
  return { contentType: "text/event-stream", body: `${events.join("")}data: [DONE]\n\n` };
}

/** Waits until something holds, and returns what it gave. */
export async function eventually(what, holds) {
  const end = Date.now() + WAIT_MS;
  for (;;) {
    const value = await holds();
    if (value) return value;
    if (Date.now() > end) throw new Error(`waited in vain: ${what}`);
    await sleep(30);
  }
}
