// Lines over the last minutes: latency, waiting work, the device's time, and how good the predictions are.
import { served } from "./tables.js";

const KEPT = 600; // snapshots: two and a half minutes

export class Charts {
  constructor(place) {
    this.charts = [
      new Lines(place, "Latency, ms", ["p50", "p95", "p99"]),
      new Lines(place, "Waiting and running", ["waiting", "being prepared", "resident"]),
      new Lines(place, "Device busy, %", ["busy"], [0, 100]),
      new Lines(place, "Predicted ÷ measured time", ["ratio"]),
    ];
  }

  add(snapshot) {
    const [latency, waiting, busy, ratio] = this.charts;
    const groups = snapshot.groups, queues = Object.values(snapshot.server.queues ?? {});
    const worst = (key) => Math.max(...served(snapshot).map((g) => g[key] ?? NaN).filter((v) => !Number.isNaN(v)));
    const ms = (key) => { const found = worst(key); return Number.isFinite(found) ? found * 1000 : null; };
    const sum = (key) => queues.reduce((total, queue) => total + (queue[key] ?? 0), 0);
    const ratios = groups.filter((g) => g.error !== null);
    latency.add(snapshot.at, [ms("p50"), ms("p95"), ms("p99")]);
    waiting.add(snapshot.at, [sum("queued") - sum("preparing"), sum("preparing"), sum("residents")]);
    busy.add(snapshot.at, [100 * Math.min(1, groups.reduce((total, g) => total + g.busy, 0))]);
    ratio.add(snapshot.at, [ratios.length ? ratios.reduce((t, g) => t + g.error, 0) / ratios.length : null]);
  }
}

const DASHES = [[], [6, 3], [2, 3]]; // told apart without colour
const COLOURS = ["#2f81d6", "#c2571a", "#a855c0"];

class Lines {
  constructor(place, title, names, range = null) {
    const box = document.createElement("div");
    box.append(Object.assign(document.createElement("h2"), { textContent: title }));
    place.append(box);
    this.box = box;
    box.hidden = true; // until it has a value
    this.data = [[], ...names.map(() => [])];
    this.moved = names.map(() => false);
    const faint = getComputedStyle(document.body).getPropertyValue("--faint"), rule = getComputedStyle(document.body).getPropertyValue("--rule");
    const axis = { stroke: faint, grid: { stroke: rule, width: 1 }, ticks: { show: false } };
    this.plot = new uPlot({
      width: this.width(), height: 150, pxAlign: false,
      cursor: { drag: { x: false, y: false } },
      scales: { x: { time: false }, y: { range: range ?? ((_, least, most) => [0, most > 0 ? most * 1.1 : 1]) } },
      axes: [{ ...axis, size: 28, incrs: [1, 2, 5, 10, 20, 30, 60], values: (_, ticks) => ticks.map((at) => ticked((this.last ?? at) - at)) }, { ...axis, size: 48 }],
      series: [
        { label: "when", value: (_, at) => (at === null ? "–" : secondsAgo((this.last ?? at) - at)) },
        ...names.map((label, i) => ({ label, stroke: COLOURS[i], dash: DASHES[i], width: 1.5, points: { show: false }, value: (_, v) => (v === null ? "–" : v.toFixed(v < 10 && !Number.isInteger(v) ? 2 : 0)) })),
      ],
    }, this.data, box);
    new ResizeObserver(() => this.plot.setSize({ width: this.width(), height: 150 })).observe(box);
  }

  width() {
    return Math.max(240, this.box.clientWidth);
  }

  add(at, values) {
    this.last = at;
    if (values.some((value) => value !== null)) this.box.hidden = false;
    const rows = this.plot.root.querySelectorAll(".u-legend .u-series"); // the first is the time
    values.forEach((value, i) => {
      this.moved[i] ||= Boolean(value); // what was always zero says nothing
      rows[i + 1].style.display = this.moved[i] || values.length === 1 ? "" : "none";
    });
    [at, ...values].forEach((value, i) => {
      this.data[i].push(value);
      if (this.data[i].length > KEPT) this.data[i].shift();
    });
    if (document.hidden) return;
    this.plot.setData(this.data);
    if (this.plot.cursor.idx === null || this.plot.cursor.left < 0) this.plot.setLegend({ idx: this.data[0].length - 1 });
  }
}

function ticked(seconds) {
  return Math.round(seconds) ? `−${Math.round(seconds)} s` : "now";
}

function secondsAgo(seconds) {
  return Math.round(seconds) ? `${Math.round(seconds)} s ago` : "now";
}
