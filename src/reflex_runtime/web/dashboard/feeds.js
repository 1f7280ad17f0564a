// Feeds: a picture of each with how it is, and a larger one of the chosen feed.
import { fill, pill } from "./tables.js";
import { milliseconds, round } from "./strip.js";

const AGAIN = 2000; // milliseconds between two small pictures of a feed
const GOOD = new Set(["running", "ended", "stopped"]);

// A tile of each feed. Those who extend it bring the pictures.
export class Tiles {
  // get: (path, signal) → the server's answer.
  constructor(section, get) {
    this.get = get;
    this.tiles = section.querySelector(".feeds");
    this.large = section.querySelector("dialog");
    this.known = section.querySelector("small");
    this.made = new Map();
    this.seen = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) target.feed.visible = isIntersecting;
      this.looked();
    });
    this.large.addEventListener("close", () => {
      this.watching?.abort();
      this.looked();
    });
    this.large.querySelector("button").addEventListener("click", () => this.large.close());
  }

  looked() {} // what is in sight has changed

  show({ server: { feeds, feeds_known } }) {
    for (const [name, tile] of this.made) {
      if (name in feeds) continue;
      this.seen.unobserve(tile.box);
      tile.box.remove();
      this.made.delete(name);
    }
    for (const [name, feed] of Object.entries(feeds)) {
      if (!this.made.has(name)) this.made.set(name, this.make(name));
      this.update(this.made.get(name), feed);
    }
    this.known.textContent = feeds_known > Object.keys(feeds).length ? `${Object.keys(feeds).length} of ${feeds_known}` : "";
  }

  make(name) {
    const box = document.createElement("button");
    const tile = { name, box, canvas: document.createElement("canvas"), said: document.createElement("span"), visible: false, busy: false, next: 0, answered: -1 };
    box.className = "feed";
    box.feed = tile;
    box.setAttribute("aria-label", `${name}: enlarge`);
    tile.canvas.width = 320;
    tile.canvas.height = 180;
    box.append(tile.canvas, Object.assign(document.createElement("b"), { textContent: name }), tile.said);
    box.addEventListener("click", () => this.enlarge(name));
    this.tiles.append(box);
    this.seen.observe(box);
    return tile;
  }

  update(tile, feed) {
    tile.said.textContent = feed.state !== "running" ? ` ${feed.state}` : ` ${round(feed.fps)} /s${feed.age > 1 ? ` · ${milliseconds(feed.age)} ago` : ""}`;
    tile.box.classList.toggle("unwell", !GOOD.has(feed.state));
  }

  async enlarge(name) {
    this.watching?.abort();
    const mine = this.watching = new AbortController();
    const canvas = this.large.querySelector("canvas"), said = this.large.querySelector("p");
    this.large.querySelector("b").textContent = name;
    canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height);
    canvas.setAttribute("aria-label", `the newest frames of ${name}`);
    said.textContent = "waiting for a frame";
    if (!this.large.open) this.large.showModal();
    this.looked();
    try {
      const answer = await this.get(`/feeds/${encodeURIComponent(name)}.mjpeg`, mine.signal);
      if (!answer.ok) throw new Error((await answer.json()).message);
      for await (const [, jpeg] of parts(answer.body.getReader())) {
        await paint(canvas, jpeg);
        said.textContent = "";
      }
      throw new Error("the server ended it");
    } catch (error) {
      if (!mine.signal.aborted) said.textContent = `no picture: ${error.message}`;
    }
  }
}

// The dashboard's: a table too, and a new picture of each feed every two seconds.
export class Feeds extends Tiles {
  constructor(section, get) {
    super(section, get);
    this.section = section;
    this.table = section.querySelector("table");
  }

  show(snapshot) {
    const feeds = snapshot.server.feeds;
    this.section.hidden = feeds === undefined;
    if (feeds === undefined) return;
    super.show(snapshot);
    fill(this.table, HEADS, Object.entries(feeds).map(([name, feed]) => cellsOf(name, feed)), TEXTS);
  }

  update(tile, feed) {
    super.update(tile, feed);
    const news = feed.answered !== tile.answered; // a feed that stands still is not asked for again
    if (tile.visible && news && !tile.busy && !document.hidden && performance.now() >= tile.next) this.draw(tile, feed.answered);
  }

  async draw(tile, answered) {
    tile.busy = true;
    try {
      const answer = await this.get(`/feeds/${encodeURIComponent(tile.name)}.jpg`);
      if (answer.status === 200) {
        await paint(tile.canvas, await answer.blob());
        tile.answered = answered;
      }
    } catch { // the stream says that the server is gone
    } finally {
      tile.busy = false;
      tile.next = performance.now() + AGAIN;
    }
  }
}

export async function paint(canvas, jpeg) {
  const bitmap = await createImageBitmap(jpeg);
  if (canvas.width !== bitmap.width || canvas.height !== bitmap.height) {
    canvas.width = bitmap.width;
    canvas.height = bitmap.height;
  }
  canvas.getContext("2d").drawImage(bitmap, 0, 0);
  bitmap.close();
}

// The pictures of a multipart answer, each with the name of its feed.
export async function* parts(reader) {
  let rest = new Uint8Array(0);
  const more = async () => {
    const { value, done } = await reader.read();
    if (done) return false;
    const joined = new Uint8Array(rest.length + value.length);
    joined.set(rest);
    joined.set(value, rest.length);
    rest = joined;
    return true;
  };
  for (;;) {
    const head = new TextDecoder("latin1").decode(rest.subarray(0, 2048));
    const found = /X-Feed: (.*)\r\n.*\r\nContent-Length: (\d+)\r\n\r\n/.exec(head);
    const end = found ? found.index + found[0].length + Number(found[2]) : Infinity;
    if (rest.length < end) {
      if (!await more()) return;
      continue;
    }
    yield [decodeURIComponent(found[1]), new Blob([rest.slice(end - Number(found[2]), end)], { type: "image/jpeg" })];
    rest = rest.slice(end);
  }
}

const HEADS = ["feed", "state", "answered", "last, ago", "p50", "p95", "frames", "dropped", "reconnects", "picture", "why"];
const TEXTS = new Set([0, 1, 7, 9, 10]);

function cellsOf(name, feed) {
  const drops = Object.entries(feed.drops).map(([reason, count]) => `${count} ${reason.replace("_", " ")}`).join(", ");
  const size = feed.resolution ? feed.resolution.join(" × ") : "–";
  const state = pill(feed.state, GOOD.has(feed.state) ? "good" : "bad");
  return [name, state, `${round(feed.fps)} /s`, milliseconds(feed.age), milliseconds(feed.p50), milliseconds(feed.p95), feed.frames, drops || "–", feed.restarts, size, feed.error];
}
