// The strip: batches as columns on a moving time axis, their requests as cells.

// Paul Tol's "muted" colours, told apart without red and green; beyond them the same colours are hatched.
const PALETTE = ["#88CCEE", "#CC6677", "#117733", "#DDCC77", "#332288", "#AA4499", "#44AA99", "#882255", "#999933"];
const KEPT = 4000; // batches
const LANES = 8; // groups and processes that have a lane of their own
const NAMES = 4000; // clients whose colour is kept
const BEHIND = 0.45; // seconds that the picture is behind, so that a batch is there before its place is
const LEAST = 3; // pixels of a column

export class Strip {
  constructor(canvas, about, legend) {
    this.canvas = canvas;
    this.about = about;
    this.legend = legend;
    this.batches = [];
    this.running = [];
    this.names = new Map(); // numbers of clients, in order of appearance
    this.seen = 0; // clients
    this.held = null; // while it is paused: the batches that it shows
    this.span = 2;
    this.paused = false;
    this.offset = null; // the server's clock less ours
    this.picked = null;
    this.shown = [];
    this.told = "";
    const dark = matchMedia("(prefers-color-scheme: dark)");
    this.dark = dark.matches;
    dark.addEventListener("change", () => { this.dark = dark.matches; });
    canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    canvas.addEventListener("pointerleave", () => this.pick(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
    const draw = () => {
      if (!document.hidden) this.draw();
      requestAnimationFrame(draw);
    };
    requestAnimationFrame(draw);
  }

  add(snapshot) {
    const offset = snapshot.at - performance.now() / 1000;
    // The newest arrivals were delayed least: follow them at once, and others slowly.
    this.offset = this.offset === null || offset > this.offset ? offset : this.offset + 0.05 * (offset - this.offset);
    for (const batch of snapshot.batches) {
      this.batches.push(batch);
      for (const [client] of batch.members) if (!this.names.has(client)) this.names.set(client, this.seen++);
    }
    if (this.batches.length > KEPT) this.batches.splice(0, this.batches.length - KEPT);
    for (const [client] of this.names) {
      if (this.names.size <= NAMES) break;
      this.names.delete(client);
    }
    this.running = snapshot.running;
    this.tellNames(snapshot.batches);
  }

  now() {
    if (this.paused) return this.stopped;
    return this.offset === null ? 0 : performance.now() / 1000 + this.offset - BEHIND;
  }

  pause(paused) {
    this.stopped = this.now();
    this.paused = paused;
    this.held = paused ? this.batches.concat(this.running) : null;
    if (!paused) this.pick(null);
  }

  colour(client) {
    return this.names.get(client) ?? 0;
  }

  draw() {
    const { canvas } = this;
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const style = getComputedStyle(document.body);
    const ink = style.color, faint = style.getPropertyValue("--faint"), rule = style.getPropertyValue("--rule");
    const now = this.now(), from = now - this.span;
    const visible = (this.held ?? this.batches.concat(this.running)).filter((b) => b.at < now && (b.took === null ? now : b.at + b.took) > from);
    let laneOf = (b) => [b.process, b.group].filter(Boolean).join(" · "); // processes run at the same time
    if (new Set(visible.map(laneOf)).size > LANES) laneOf = (b) => b.group;
    const groups = [...new Set(visible.map(laneOf))].sort();
    const lane = (height - 18) / Math.max(1, groups.length);
    const x = (at) => ((at - from) / this.span) * width;
    this.shown = [];
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "alphabetic";
    this.axis(pen, now, width, height, x, faint, rule);
    groups.forEach((group, index) => {
      const mine = visible.filter((b) => laneOf(b) === group);
      const top = index * lane + 16;
      const most = Math.max(1, ...mine.map((b) => b.size));
      const waiting = Math.max(...mine.map((b) => b.queued));
      const below = waiting ? lane * 0.22 : 4;
      const base = index * lane + lane - below;
      const unit = Math.min(34, (base - top) / most);
      pen.strokeStyle = faint;
      pen.beginPath();
      pen.moveTo(0, base + 0.5);
      pen.lineTo(width, base + 0.5);
      pen.stroke();
      for (const batch of mine) this.column(pen, batch, x, base, unit, now, waiting ? (below - 3) / waiting : 0, ink, faint);
      if (groups.length > 1) {
        pen.fillStyle = ink;
        pen.fillText(group, 6, index * lane + 12);
      }
      if (waiting) {
        pen.fillStyle = faint;
        pen.fillText(`waiting, at most ${waiting}`, 6, base + below - 4);
      }
    });
    if (!visible.length) {
      pen.fillStyle = faint;
      pen.fillText("No batch ran in this time.", 12, height / 2);
    }
  }

  axis(pen, now, width, height, x, faint, rule) {
    const steps = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20];
    const step = steps.find((s) => (s / this.span) * width > 70) ?? 20;
    pen.fillStyle = faint;
    pen.strokeStyle = rule;
    pen.beginPath();
    for (let age = step; age < this.span; age += step) { // the lines stand still, and the batches move
      const left = Math.round(x(now - age)) + 0.5;
      pen.moveTo(left, 0);
      pen.lineTo(left, height - 16);
      pen.fillText(step < 1 && this.span <= 1 ? `−${Math.round(age * 1000)} ms` : `−${age.toFixed(step < 1 ? 1 : 0)} s`, left + 3, height - 5);
    }
    pen.stroke();
  }

  column(pen, batch, x, base, unit, now, perWaiting, ink, faint) {
    const left = x(batch.at);
    const end = batch.took === null ? now : Math.min(now, batch.at + batch.took);
    const width = Math.max(LEAST, x(end) - left - 1);
    const height = batch.size * unit;
    let bottom = base;
    const stacked = [...batch.members].sort(([one], [other]) => this.colour(one) - this.colour(other));
    for (const [client, , , entered] of stacked) {
      this.cell(pen, this.colour(client), left, bottom - unit, width, unit, entered);
      if (width > 26 && unit > 12) {
        const label = shortName(client, Math.floor(width / 7));
        pen.fillStyle = inkOn(PALETTE[this.colour(client) % PALETTE.length]);
        pen.fillText(label, left + 3, bottom - unit / 2 + 4);
      }
      bottom -= unit;
    }
    if (batch.members.length < batch.size) { // more than the snapshot names
      pen.fillStyle = faint;
      pen.fillRect(left, base - height, width, bottom - base + height);
    }
    if (batch.took === null || batch.failed) {
      pen.strokeStyle = ink;
      pen.setLineDash(batch.failed ? [2, 2] : [5, 3]);
      pen.strokeRect(left + 0.5, base - height + 0.5, width - 1, height - 1);
      pen.setLineDash([]);
    }
    if (batch.expected > 0) { // where it was predicted to end
      const predicted = Math.round(x(batch.at + batch.expected)) + 0.5;
      pen.strokeStyle = ink;
      pen.beginPath();
      pen.moveTo(predicted, base - 1);
      pen.lineTo(predicted, base - Math.min(height, 9));
      pen.stroke();
    }
    pen.fillStyle = ink;
    if (width > 11) pen.fillText(batch.failed ? `✕ ${batch.size}` : String(batch.size), left + 1, base - height - 3);
    if (batch.queued) {
      pen.fillStyle = faint;
      pen.fillRect(left, base + 2, width, Math.max(1, batch.queued * perWaiting));
    }
    if (batch === this.picked) {
      pen.strokeStyle = ink;
      pen.lineWidth = 2;
      pen.strokeRect(left - 1, base - height - 1, width + 2, height + 2);
      pen.lineWidth = 1;
    }
    this.shown.push({ batch, left, right: left + width, top: base - height, base });
  }

  cell(pen, colour, left, top, width, height, entered) {
    pen.fillStyle = PALETTE[colour % PALETTE.length];
    pen.fillRect(left, top + 0.5, width, Math.max(1, height - 1));
    const hatch = Math.floor(colour / PALETTE.length) % 4;
    if (this.dark && width > 4 && height > 4) { // the darkest colours, on a dark page
      pen.strokeStyle = "#ffffff38";
      pen.strokeRect(left + 0.5, top + 1, width - 1, height - 2);
    }
    if (hatch && width > 4 && height > 4) {
      pen.strokeStyle = "#ffffffaa";
      pen.beginPath();
      for (let at = 3; at < width + height; at += 6) {
        if (hatch !== 2) { pen.moveTo(left + Math.min(at, width), top + Math.max(0, at - width)); pen.lineTo(left + Math.max(0, at - height), top + Math.min(at, height)); }
        if (hatch !== 1) { pen.moveTo(left + Math.max(0, width - at), top + Math.max(0, at - width)); pen.lineTo(left + Math.min(width, width - at + height), top + Math.min(at, height)); }
      }
      pen.stroke();
    }
    if (!entered && width > 3) { // it had run before: a step of its own
      pen.fillStyle = "#ffffff55";
      pen.fillRect(left, top + 0.5, Math.min(2, width), Math.max(1, height - 1));
    }
  }

  point(atX, atY) {
    const near = this.shown.filter((s) => atX >= s.left - 2 && atX <= s.right + 2 && atY <= s.base + 30);
    near.sort((a, b) => Math.abs(a.base - atY) - Math.abs(b.base - atY));
    this.pick(near.length ? near[near.length - 1].batch : null, atX);
  }

  key(event) {
    if (event.key === " ") {
      event.preventDefault();
      document.getElementById("pause").click();
    } else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      event.preventDefault();
      const list = this.shown.map((s) => s.batch);
      if (!list.length) return;
      if (!this.paused) document.getElementById("pause").click();
      const at = list.indexOf(this.picked);
      const next = at < 0 ? list.length - 1 : at + (event.key === "ArrowLeft" ? -1 : 1);
      if (list[next]) this.pick(list[next], this.shown[next].left);
    } else if (event.key === "Escape") {
      this.pick(null);
    }
  }

  pick(batch, atX = 0) {
    this.picked = batch;
    this.about.hidden = batch === null;
    if (batch === null) return;
    const right = atX > this.canvas.clientWidth / 2;
    this.about.style.left = right ? "auto" : `${Math.max(8, atX + 14)}px`;
    this.about.style.right = right ? `${Math.max(8, this.canvas.clientWidth - atX + 14)}px` : "auto";
    const lines = aboutBatch(batch).map((text) => Object.assign(document.createElement("p"), { textContent: text }));
    const list = document.createElement("ul");
    if (batch.members.length === 1) list.style.columns = 1;
    for (const [client, units, waited] of batch.members.slice(0, 24)) {
      const item = document.createElement("li");
      item.append(this.swatch(client), `${client} · ${milliseconds(waited)}${units === 1 ? "" : ` · ${round(units)}`}`);
      list.append(item);
    }
    if (batch.size > 24) list.append(Object.assign(document.createElement("li"), { textContent: `and ${batch.size - 24} more` }));
    this.about.replaceChildren(...lines, list);
  }

  swatch(client) {
    const small = Object.assign(document.createElement("canvas"), { width: 12, height: 12 });
    this.cell(small.getContext("2d"), this.colour(client), 0, 0, 12, 12, true);
    return small;
  }

  tellNames(batches) {
    const seen = new Set(batches.flatMap((b) => b.members.map(([client]) => client)));
    for (const client of this.lately ?? []) seen.add(client);
    this.lately = [...seen].slice(0, 18);
    const told = this.lately.join("\n") + this.seen;
    if (told === this.told) return;
    this.told = told;
    const items = this.lately.map((client) => {
      const item = document.createElement("li");
      item.append(this.swatch(client), client);
      return item;
    });
    if (this.seen > this.lately.length) {
      items.push(Object.assign(document.createElement("li"), { textContent: `${this.seen} in all` }));
    }
    this.legend.replaceChildren(...items);
  }
}

const CAUSES = {
  full: "its budget was full", size_reached: "it had as many as a batch may have", held: "the hold was over",
  over_budget: "one request is over the budget", idle: "the device was free and nothing else was due",
  urgent: "an urgent request came", step: "the next step of what runs", apart: "a part of a call that failed",
  drain: "the server is draining",
};
const SHORT = {
  budget: "the budget was full", places: "no place was free", room: "no room for new ones", memory: "the memory was full",
  share: "its clients had their share", stage: "it is of another stage",
};

export function aboutBatch(batch) {
  const took = batch.took === null ? "runs" : `took ${milliseconds(batch.took)}`;
  const predicted = batch.expected > 0 ? `, predicted ${milliseconds(batch.expected)}` : "";
  const lines = [
    `Batch ${batch.id} of ${batch.group}${batch.stage ? `, ${batch.stage}` : ""}${batch.process ? `, in ${batch.process}` : ""}: ${batch.size} request${batch.size === 1 ? "" : "s"}`,
    `${took}${predicted}${batch.failed ? "; it failed" : ""}`,
    `It left: ${CAUSES[batch.cause] ?? batch.cause}`,
  ];
  if (batch.queued) lines.push(`${batch.queued} left waiting${batch.short_of ? `: ${SHORT[batch.short_of] ?? batch.short_of}` : ""}`);
  return lines;
}

export function milliseconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const ms = seconds * 1000;
  if (!ms) return "0 ms";
  if (ms >= 10000) return `${(ms / 1000).toFixed(1)} s`;
  return ms >= 100 ? `${Math.round(ms)} ms` : ms >= 10 ? `${ms.toFixed(1)} ms` : `${ms.toFixed(2)} ms`;
}

export function round(value) {
  if (value === null || value === undefined) return "–";
  return Math.abs(value) >= 100 || Number.isInteger(value) ? String(Math.round(value)) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function shortName(client, most) {
  const connection = / (#\d+)$/.exec(client); // its number says more than the address
  if (client.length > most && connection) return connection[1];
  return client.length <= most ? client : `…${client.slice(1 - most)}`;
}

function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.45 ? "#ffffff" : "#222222";
}
