// Timelines: bars of one processor on a canvas, from JSON of the schema iosim.timeline/1.
for (const box of document.querySelectorAll(".timeline")) {
  const data = JSON.parse(document.getElementById(box.dataset.from).textContent);
  const canvas = box.querySelector("canvas"), told = box.querySelector(".told"), key = box.querySelector(".key");
  const radios = [...box.querySelectorAll("input[type=radio]")];
  const labels = { dram: "DRAM", l2: "L2", sram: "SRAM" };
  const most = Math.max(...data.stages.map((s) => (s.fits ? s.window_ps[1] - s.window_ps[0] : 0)));
  const ROW = 20, LANE = 14, CURVE = 56, TOP = 22, GAP = 10;
  let from = 0, to = most, rows = [], curves = [], chosen = null, stage = null, left = 100;

  // Phases that use the matrix and the exp unit give the bars of warp groups their colours.
  const users = (unit) => {
    const out = new Set();
    for (const s of data.stages) for (const t of s.tracks || [])
      if (t.kind === "unit" && t.name === unit) for (const b of t.spans) out.add(data.names[b[2]].name);
    return out;
  };
  const products = users("matrix"), exps = users("exp");
  const colourOf = (track, name) => {
    if (name.kind === "wait") return data.waits[name.name].colour;
    if (name.name === "other blocks") return data.colours.grey;
    if (track.kind === "load") return data.colours.load;
    if (track.kind === "group") return data.colours[products.has(name.name) ? "matrix" : exps.has(name.name) ? "exp" : "other"];
    return data.colours[track.name];
  };

  // Bars of one row that overlap in time lie below one another.
  const lanesOf = (track) => {
    const ends = [];
    return track.spans.map((b) => {
      let lane = track.kind === "load" ? ends.findIndex((end) => end <= b[0]) : 0;
      if (lane < 0) lane = ends.length;
      ends[lane] = b[0] + b[1];
      return { bar: b, lane };
    });
  };
  const choose = (n) => {
    stage = data.stages[n];
    rows = [];
    let y = TOP;
    for (const track of stage.tracks) {
      if (["dram", "l2"].includes(track.name)) continue; // of the whole chip: curves below
      const bars = lanesOf(track), lanes = 1 + Math.max(0, ...bars.map((b) => b.lane));
      const height = lanes > 1 ? lanes * LANE : ROW;
      rows.push({ track, bars, lanes, y, height });
      y += height + 3;
    }
    curves = [
      { name: "SRAM in use", top: `${stage.sram.capacity_bytes / 1024} KiB`, y: y + GAP,
        at: stage.sram.in_use.map(([t, held]) => [t, held / stage.sram.capacity_bytes]) },
      ...["l2", "dram"].filter((name) => stage.bandwidth[name]).map((name, n) => {
        const values = stage.bandwidth[name], step = (stage.window_ps[1] - stage.window_ps[0]) / values.length;
        return { name: `${labels[name]} used`, top: "100 %", y: y + GAP + (n + 1) * (CURVE + GAP), at: values.map((v, i) => [i * step, v]) };
      }),
    ];
    canvas.style.height = `${y + GAP + curves.length * (CURVE + GAP) + 4}px`;
    chosen = null;
    tell();
    draw();
    legend();
  };

  const time = (ps) => (ps >= 1e6 ? `${(ps / 1e6).toPrecision(4)} µs` : `${(ps / 1e3).toPrecision(4)} ns`);
  const words = ({ row, at }) => {
    const [start, length, what, turn, block] = row.bars[at].bar, name = data.names[what];
    const said = name.kind === "wait" ? `waits: ${data.waits[name.name].words}` : name.name;
    return `${labels[row.track.name] || row.track.name}: ${said}` + (turn === null ? "" : `, iteration ${turn}`) +
      (block === null ? "" : `, block ${block}`) + `; ${time(length)}, from ${time(start)} to ${time(start + length)}`;
  };
  const tell = () => {
    const summary = `Whole kernel ${time(stage.kernel_ps)}; ${time(stage.window_ps[1] - stage.window_ps[0])} shown, ` +
      `${stage.blocks.length} ${stage.blocks.length === 1 ? "block" : "blocks"} on this processor.`;
    told.textContent = chosen ? words(chosen) : summary;
  };

  const stripes = new Map();
  const striped = (g, colour) => {
    if (!stripes.has(colour)) {
      const tile = document.createElement("canvas"), h = tile.getContext("2d");
      tile.width = tile.height = 6;
      h.strokeStyle = colour;
      h.lineWidth = 1.4;
      for (const x of [-6, 0, 6]) { h.moveTo(x, 6); h.lineTo(x + 6, 0); }
      h.stroke();
      stripes.set(colour, g.createPattern(tile, "repeat"));
    }
    return stripes.get(colour);
  };
  const x = (ps) => left + ((ps - from) / (to - from)) * (canvas.clientWidth - left - 4);
  const draw = () => {
    const style = getComputedStyle(document.documentElement), g = canvas.getContext("2d"), scale = devicePixelRatio || 1;
    const [ink, soft, rule, paper] = ["--ink", "--soft", "--rule", "--paper"].map((name) => style.getPropertyValue(name));
    const width = canvas.clientWidth, height = canvas.clientHeight;
    left = width < 560 ? 64 : 100;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    g.scale(scale, scale);
    g.font = "11px system-ui, sans-serif";
    g.textBaseline = "middle";
    // the axis: a step of 1, 2 or 5 times a power of ten that leaves room for its labels
    const least = ((to - from) * 70) / (width - left), power = 10 ** Math.floor(Math.log10(least));
    const step = power * [1, 2, 5, 10].find((n) => n * power >= least);
    g.lineWidth = 1;
    for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
      g.strokeStyle = rule;
      g.beginPath();
      g.moveTo(x(t), TOP - 6);
      g.lineTo(x(t), height);
      g.stroke();
      g.fillStyle = soft;
      g.fillText(`${+(t / 1e6).toPrecision(6)} µs`, Math.min(x(t), width - 44), 8);
    }
    for (const row of rows) {
      g.fillStyle = ink;
      g.fillText(labels[row.track.name] || row.track.name, 0, row.y + row.height / 2, left - 6);
    }
    for (const curve of curves) {
      g.fillStyle = ink;
      g.fillText(curve.name, 0, curve.y + CURVE / 2 - 7, left - 6);
      g.fillStyle = soft;
      g.fillText(`of ${curve.top}`, 0, curve.y + CURVE / 2 + 7, left - 6);
    }
    g.save();
    g.beginPath();
    g.rect(left, 0, width - left, height);
    g.clip();
    for (const row of rows) {
      const each = row.height / row.lanes;
      for (const { bar, lane } of row.bars) {
        const a = x(bar[0]), b = x(bar[0] + bar[1]);
        if (b < left || a > width) continue;
        const name = data.names[bar[2]], colour = colourOf(row.track, name), wide = Math.max(b - a, 0.7), y = row.y + lane * each;
        g.fillStyle = name.kind === "wait" ? striped(g, colour) : colour;
        g.fillRect(a, y + 1, wide, each - 2);
        if (name.kind !== "wait" && row.track.kind !== "unit" && wide > 3) {
          g.strokeStyle = paper;
          g.strokeRect(a, y + 1, wide, each - 2);
        }
        const text = name.kind === "wait" || row.track.kind === "unit" ? "" : `${name.name}${bar[3] === null ? "" : ` ${bar[3]}`}`;
        const short = [text, text && bar[3] !== null ? `${bar[3]}` : ""].find((s) => s && g.measureText(s).width + 6 < wide);
        if (short) {
          g.fillStyle = row.track.kind === "load" ? "#fff" : "#000";
          g.fillText(short, Math.max(a, left) + 3, y + each / 2 + 0.5);
        }
      }
    }
    for (const curve of curves) {
      g.strokeStyle = rule;
      g.strokeRect(left, curve.y, width - left - 1, CURVE);
      g.strokeStyle = ink;
      g.lineWidth = 1.3;
      g.beginPath();
      const end = stage.window_ps[1] - stage.window_ps[0];
      curve.at.forEach(([t, share], n) => {
        const y = curve.y + CURVE * (1 - Math.min(1, share)), until = n + 1 < curve.at.length ? curve.at[n + 1][0] : end;
        g.lineTo(x(t), y);
        g.lineTo(x(until), y);
      });
      g.stroke();
      g.lineWidth = 1;
    }
    if (chosen) {
      const { bar, lane } = chosen.row.bars[chosen.at], each = chosen.row.height / chosen.row.lanes;
      g.strokeStyle = ink;
      g.lineWidth = 2;
      g.strokeRect(x(bar[0]), chosen.row.y + lane * each, Math.max(2, x(bar[0] + bar[1]) - x(bar[0])), each);
    }
    g.restore();
  };
  const legend = () => {
    const seen = new Map([["load in flight", [data.colours.load, false]], ["matrix products", [data.colours.matrix, false]],
      ["softmax (exp)", [data.colours.exp, false]], ["other vector work", [data.colours.other, false]]]);
    for (const { track, bars } of rows) for (const { bar } of bars) {
      const name = data.names[bar[2]];
      if (name.kind === "wait") seen.set(`waits: ${data.waits[name.name].words}`, [data.waits[name.name].colour, true]);
    }
    key.replaceChildren(...[...seen].map(([text, [colour, hatched]]) => {
      const entry = document.createElement("span"), mark = document.createElement("i");
      mark.style.background = hatched ? `repeating-linear-gradient(135deg, ${colour} 0 1.5px, transparent 1.5px 4px)` : colour;
      if (hatched) mark.style.borderColor = colour;
      entry.append(mark, text);
      return entry;
    }));
  };

  const look = (a, b) => {
    const span = Math.min(most, Math.max(b - a, most / 2000));
    from = Math.min(Math.max(0, a), most - span);
    to = from + span;
    draw();
  };
  const zoom = (by, middle = (from + to) / 2) => look(middle - (middle - from) * by, middle + (to - middle) * by);
  const ps = (event) => from + ((event.clientX - canvas.getBoundingClientRect().left - left) / (canvas.clientWidth - left - 4)) * (to - from);
  const under = (event) => {
    const y = event.clientY - canvas.getBoundingClientRect().top, t = ps(event);
    const row = rows.find((r) => r.y <= y && y < r.y + r.height);
    if (!row || t < from) return null;
    const lane = Math.floor(((y - row.y) / row.height) * row.lanes), slack = ((to - from) / canvas.clientWidth) * 1.5;
    const at = row.bars.findIndex(({ bar, lane: l }) => l === lane && bar[0] - slack <= t && t < bar[0] + bar[1] + slack);
    return at < 0 ? null : { row, at };
  };
  const select = (found) => {
    chosen = found;
    tell();
    draw();
  };
  const step = (sideways, down) => {
    if (!chosen) return select({ row: rows[0], at: 0 });
    let { row, at } = chosen;
    if (down) {
      const [start, length] = row.bars[at].bar, middle = start + length / 2;
      row = rows[Math.min(rows.length - 1, Math.max(0, rows.indexOf(row) + down))];
      const away = row.bars.map(({ bar }) => Math.max(0, bar[0] - middle, middle - bar[0] - bar[1]));
      at = away.indexOf(Math.min(...away));
    } else at = Math.min(row.bars.length - 1, Math.max(0, at + sideways));
    const [start, length] = row.bars[at].bar, span = to - from;
    if (start < from || start + length > to) look(start + length / 2 - span / 2, start + length / 2 + span / 2);
    return select({ row, at });
  };
  const doings = {
    in: () => zoom(0.5), out: () => zoom(2), all: () => look(0, most),
    left: () => look(from - (to - from) / 3, to - (to - from) / 3), right: () => look(from + (to - from) / 3, to + (to - from) / 3),
  };
  for (const button of box.querySelectorAll("[data-do]")) button.addEventListener("click", () => doings[button.dataset.do]());
  for (const radio of radios) radio.addEventListener("change", () => choose(Number(radio.value)));
  const keys = {
    ArrowLeft: () => step(-1, 0), ArrowRight: () => step(1, 0), ArrowUp: () => step(0, -1), ArrowDown: () => step(0, 1),
    "+": doings.in, "=": doings.in, "-": doings.out, Home: doings.all, Escape: () => select(null),
  };
  canvas.addEventListener("keydown", (event) => {
    const radio = radios[Number(event.key) - 1];
    if (event.ctrlKey || event.metaKey || event.altKey || !(keys[event.key] || (radio && !radio.disabled))) return;
    event.preventDefault();
    if (keys[event.key]) return keys[event.key]();
    radio.checked = true;
    choose(Number(radio.value));
  });
  // A drag moves along time, two fingers zoom, else the bar under the pointer says what it is.
  const fingers = new Map();
  let pinch = 0;
  canvas.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, event);
    canvas.setPointerCapture(event.pointerId);
    select(under(event));
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId);
    if (before && fingers.size === 1) {
      const moved = ps(before) - ps(event);
      if (moved) look(from + moved, to + moved);
    } else if (!before) {
      const found = under(event);
      if (found ? !chosen || found.row !== chosen.row || found.at !== chosen.at : chosen) select(found);
    }
    if (before) fingers.set(event.pointerId, event);
    if (fingers.size === 2) {
      const [a, b] = [...fingers.values()], apart = Math.abs(a.clientX - b.clientX);
      if (pinch && apart) zoom(pinch / apart, (ps(a) + ps(b)) / 2);
      pinch = apart;
    }
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => {
    fingers.delete(event.pointerId);
    pinch = 0;
  });
  canvas.addEventListener("pointerleave", () => { if (!fingers.size && document.activeElement !== canvas) select(null); });
  canvas.addEventListener("dblclick", (event) => zoom(0.5, ps(event)));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey && document.activeElement !== canvas) return; // else the page scrolls
    event.preventDefault();
    zoom(Math.exp((event.deltaY || event.deltaX) / 400), ps(event));
  }, { passive: false });
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  choose(radios.findIndex((radio) => radio.checked));
}
