// The page of all feeds: their newest frames, which come in one answer for all that are in sight.
import { Tiles, paint, parts } from "./feeds.js";
import { $, get, say, watch } from "./link.js";

const SETTLES = 200; // milliseconds until what is in sight is asked for: a scroll changes it often
const AGAIN = 1000; // milliseconds until the next try
const MOST = 64; // feeds that the server sends in one answer
const SIZES = { small: "12rem", middle: "20rem", large: "36rem" };
const STEPS = { ArrowLeft: () => -1, ArrowRight: () => 1, ArrowUp: (columns) => -columns, ArrowDown: (columns) => columns };

class Grid extends Tiles {
  constructor(section) {
    super(section, get);
    this.asked = ""; // the feeds that are asked for
    document.addEventListener("visibilitychange", () => this.looked());
    this.tiles.addEventListener("keydown", (event) => this.move(event));
  }

  looked() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.follow(), SETTLES);
  }

  // Ask for what is in sight, unless it is asked for already. Nothing is, behind a large picture or another tab.
  follow(anew = false) {
    const sees = !document.hidden && !this.large.open;
    const names = sees ? [...this.made.values()].filter((tile) => tile.visible).map((tile) => tile.name).slice(0, MOST) : [];
    const asked = names.map((name) => `feed=${encodeURIComponent(name)}`).join("&");
    if (asked === this.asked && !anew) return;
    this.asked = asked;
    this.stream?.abort();
    if (asked) this.draw(asked, this.stream = new AbortController());
  }

  async draw(asked, mine) {
    try {
      const answer = await this.get(`/feeds.mjpeg?${asked}`, mine.signal);
      if (!answer.ok) throw new Error((await answer.json()).message);
      for await (const [name, jpeg] of parts(answer.body.getReader())) {
        const tile = this.made.get(name);
        if (tile) await paint(tile.canvas, jpeg);
      }
    } catch (error) {
      if (!mine.signal.aborted) say(`no pictures: ${error.message}`, "warn");
    }
    if (!mine.signal.aborted) setTimeout(() => mine === this.stream && this.follow(true), AGAIN);
  }

  move(event) {
    const step = STEPS[event.key], tiles = [...this.tiles.children];
    if (!step || event.ctrlKey || event.altKey || event.metaKey) return;
    const columns = tiles.filter((tile) => tile.offsetTop === tiles[0].offsetTop).length;
    tiles[tiles.indexOf(document.activeElement) + step(columns)]?.focus();
    event.preventDefault();
  }
}

let grid = null;

function show(snapshot) {
  const { server } = snapshot;
  $("feeds").hidden = false;
  grid ??= new Grid($("feeds"));
  grid.show(snapshot);
  $("state").textContent = server.error ? `${server.state}: ${server.error}` : server.state;
  $("state").className = `pill ${server.state === "ready" ? "good" : "warn"}`;
  say("live", "good");
}

function choose(size) {
  localStorage.setItem("reflex-tile", size);
  document.body.style.setProperty("--tile", SIZES[size]);
  for (const button of $("sizes").children) button.setAttribute("aria-pressed", String(button.textContent === size));
}

for (const size of Object.keys(SIZES)) {
  const button = Object.assign(document.createElement("button"), { textContent: size });
  button.addEventListener("click", () => choose(size));
  $("sizes").append(button);
}
const kept = localStorage.getItem("reflex-tile");
choose(kept in SIZES ? kept : "middle");
watch(show);
