'use strict';
/* Drawings of numbers. Colours come from the style sheet, so that both themes have their own. */

const charts = (() => {
  const colour = (name) => `var(--${name})`;

  /** A round number not below `value`, for the end of an axis. */
  function ceiling(value) {
    if (value <= 0) return 1;
    const unit = 10 ** Math.floor(Math.log10(value));
    return [1, 2, 3, 4, 6, 8, 10].find((step) => step * unit >= value * 0.999) * unit;
  }

  const short = (value) => {
    if (value >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
    return value >= 1e4 ? `${+(value / 1e3).toPrecision(3)}k` : `${+value.toPrecision(3)}`;
  };

  /** Grid lines and their values for an axis from 0 to `top`. */
  function axis(width, { left, top: above, height }, top, label = short) {
    return [0, 0.5, 1].flatMap((share) => {
      const y = above + height * (1 - share);
      return [
        draw('line', { x1: left, x2: width, y1: y, y2: y, class: share ? 'grid' : 'base' }),
        draw('text', { x: left - 8, y: y + 4, 'text-anchor': 'end', text: label(top * share) }),
      ];
    });
  }

  const widthOf = (holder) => Math.max(280, holder.clientWidth);

  function frame(holder, height, label) {
    const width = widthOf(holder);
    return { width, svg: draw('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': label }) };
  }

  function empty(holder, text) {
    holder.replaceChildren(make('p', { class: 'empty', text }));
  }

  /** A bar with round shoulders that stands on its line. */
  function bar(x, y, width, height, paint, title) {
    const r = Math.min(3, width / 2, height);
    const path = `M${x},${y + height}V${y + r}Q${x},${y} ${x + r},${y}H${x + width - r}Q${x + width},${y} ${x + width},${y + r}V${y + height}Z`;
    return draw('path', { d: path, paint }, draw('title', { text: title }));
  }

  /** Values over time, the newest at the right end. `points` are `[seconds ago, value]`. */
  function line(holder, points, span, label) {
    if (points.length < 2) return empty(holder, 'A moment, please: two readings make a rate.');
    const area = { left: 44, top: 8, height: 110 };
    const { width, svg } = frame(holder, 142, label);
    const top = ceiling(Math.max(1, ...points.map(([, value]) => value)));
    const x = (ago) => width - 4 - (ago / span) * (width - area.left - 4);
    const y = (value) => area.top + area.height * (1 - value / top);
    const path = points.map(([ago, value]) => `${x(ago).toFixed(1)},${y(value).toFixed(1)}`).join('L');
    const [[oldest], [newest, latest]] = [points[0], points.at(-1)];
    const base = area.top + area.height;
    svg.append(
      ...axis(width, area, top),
      draw('path', { d: `M${path}V${base}H${x(oldest)}Z`, paint: colour('decode'), opacity: '0.12' }),
      draw('path', { d: `M${path}`, fill: 'none', stroke: colour('decode'), 'stroke-width': 2, 'stroke-linejoin': 'round' }),
      draw('circle', { cx: x(newest), cy: y(latest), r: 4, paint: colour('decode') }),
      draw('text', { x: area.left, y: 138, text: `${span} s ago` }),
      draw('text', { x: width, y: 138, 'text-anchor': 'end', text: 'now' }),
    );
    svg.querySelectorAll('path[stroke]').forEach((path) => { path.style.stroke = colour('decode'); });
    holder.replaceChildren(svg);
  }

  /** Counts in buckets; `bounds` are their upper ends in seconds, the last bucket has none. */
  function histogram(holder, { bounds, counts }, label) {
    const total = counts.reduce((sum, one) => sum + one, 0);
    if (!total) return empty(holder, 'No tokens yet.');
    let [from, to] = [counts.findIndex(Boolean), counts.findLastIndex(Boolean)];
    from = Math.max(0, Math.min(from - 1, counts.length - 7));
    to = Math.min(counts.length - 1, Math.max(to + 1, from + 6));
    const area = { left: 44, top: 8, height: 104 };
    const { width, svg } = frame(holder, 136, label);
    const shown = counts.slice(from, to + 1);
    const top = ceiling(Math.max(2, ...shown));
    const step = (width - area.left) / shown.length;
    svg.append(...axis(width, area, top));
    shown.forEach((value, place) => {
      const x = area.left + place * step;
      const bound = bounds[from + place];
      const name = bound === undefined ? `over ${seconds(bounds.at(-1))}` : `up to ${seconds(bound)}`;
      const height = (value / top) * area.height;
      if (value) svg.append(bar(x + 1, area.top + area.height - Math.max(1.5, height), step - 2, Math.max(1.5, height), colour('decode'), `${name}: ${count(value)}`));
      if (step > 44 || place % 2 === 0) {
        const mark = bound === undefined ? 'more' : seconds(bound);
        svg.append(draw('text', { x: x + step - (bound === undefined ? step / 2 : 1), y: 130, 'text-anchor': bound === undefined ? 'middle' : 'end', text: mark }));
      }
    });
    holder.replaceChildren(svg);
  }

  /** The quantile `share` of a histogram, by interpolation in its bucket. */
  function quantile({ bounds, counts }, share) {
    const total = counts.reduce((sum, one) => sum + one, 0);
    let below = 0;
    for (let place = 0; total && place < bounds.length; place += 1) {
      const low = place ? bounds[place - 1] : 0;
      if (below + counts[place] >= share * total) {
        return low + ((bounds[place] - low) * (share * total - below)) / counts[place];
      }
      below += counts[place];
    }
    return total ? Infinity : NaN;
  }

  /** Tokens of each step, prefill above decode, and below how long it took. */
  function steps(holder, list, label) {
    if (!list.length) return empty(holder, 'No steps yet. They appear as soon as somebody asks the model for something.');
    const { width, svg } = frame(holder, 236, label);
    const [tokens, times] = [{ left: 44, top: 8, height: 116 }, { left: 44, top: 152, height: 60 }];
    const slots = Math.max(40, Math.min(160, Math.floor((width - 44) / 6)));
    const shown = list.slice(-slots);
    const step = (width - tokens.left) / slots;
    const top = ceiling(Math.max(...shown.map((one) => one.decode_tokens + one.prefill_tokens)));
    const slowest = ceiling(Math.max(...shown.map((one) => one.duration_us)) / 1e3);
    svg.append(...axis(width, tokens, top), ...axis(width, times, slowest, (value) => (value ? seconds(value / 1e3) : '0')));
    shown.forEach((one, place) => {
      const x = width - (shown.length - place) * step;
      const name = `step ${one.id}: ${one.decode_tokens} decode + ${one.prefill_tokens} prefill tokens, ${seconds(one.duration_us / 1e6)}`;
      const [decode, prefill] = [one.decode_tokens, one.prefill_tokens].map((value) => (value / top) * tokens.height);
      const base = tokens.top + tokens.height;
      const gap = decode && prefill > 3 ? 1 : 0;
      if (decode) svg.append(bar(x + 0.5, base - decode, step - 1, decode, colour('decode'), name));
      if (prefill) svg.append(bar(x + 0.5, base - decode - prefill, step - 1, prefill - gap, colour('prefill'), name));
      const time = Math.max(1, (one.duration_us / 1e3 / slowest) * times.height);
      svg.append(bar(x + 0.5, times.top + times.height - time, step - 1, time, colour('time'), name));
    });
    svg.append(draw('text', { x: width, y: 232, 'text-anchor': 'end', text: `step ${count(shown.at(-1).id)}` }));
    svg.append(draw('text', { x: 44, y: 144, text: 'how long it took' }));
    holder.replaceChildren(svg);
  }

  /** The largest edges of the tree: depth to the right, leaves downward. */
  function tree(holder, view, blockSize, label) {
    if (!view.largest.length) return empty(holder, 'Nothing is cached yet.');
    const height = 190;
    const { width, svg } = frame(holder, height + 22, label);
    const [x, y] = [(blocks) => (blocks / view.depth) * width, (leaf) => (leaf / view.leaves) * height];
    for (const edge of [...view.largest].reverse()) {
      const [left, right] = [x(edge.start), x(edge.start + edge.blocks)];
      const [above, below] = [y(edge.first_leaf), y(edge.first_leaf + edge.leaves)];
      const gap = below - above > 3 ? 1 : 0;
      const used = (edge.used / edge.blocks) * (right - left);
      const size = { y: above, height: Math.max(1, below - above - gap), rx: 1.5 };
      const title = `tokens ${count(edge.start * blockSize)} to ${count((edge.start + edge.blocks) * blockSize)}: ${count(edge.blocks)} blocks, ${count(edge.used)} in use, ${count(edge.leaves)} paths through it`;
      svg.append(draw('g', {}, draw('title', { text: title }),
        draw('rect', { x: left, width: Math.max(1, right - left - 1), paint: colour('cached'), ...size }),
        used > 0.5 ? draw('rect', { x: left, width: Math.max(1, used - 1), paint: colour('private'), ...size }) : null));
    }
    svg.append(draw('text', { x: 0, y: height + 18, text: 'beginning of the prompt' }));
    svg.append(draw('text', { x: width, y: height + 18, 'text-anchor': 'end', text: `token ${count(view.depth * blockSize)}` }));
    holder.replaceChildren(svg);
  }

  /** The pool, a cell for each few blocks, in the order of their ids. Returns the cell at a place of the canvas. */
  function pool(canvas, map) {
    const scale = window.devicePixelRatio || 1;
    const [width, height] = [Math.max(100, canvas.clientWidth), canvas.clientHeight];
    canvas.width = width * scale;
    canvas.height = height * scale;
    const context = canvas.getContext('2d');
    context.scale(scale, scale);
    const total = Math.max(1, map.cells.length);
    let columns = Math.ceil(Math.sqrt((total * width) / height));
    while (Math.ceil(total / columns) * (width / columns) > height + 0.5) columns += 1;
    const size = width / columns;
    const style = getComputedStyle(document.documentElement);
    const paints = ['free', 'private', 'shared', 'cached'].map((name) => style.getPropertyValue(`--${name}`));
    const gap = size > 5 ? 1 : 0;
    map.cells.forEach((cell, place) => {
      const [x, y] = [(place % columns) * size, Math.floor(place / columns) * size];
      const whole = cell.reduce((sum, one) => sum + one, 0) || 1;
      let from = 0;
      /* A cell of several blocks shows each state's share, from the left. */
      cell.forEach((one, state) => {
        if (!one) return;
        const wide = ((size - gap) * one) / whole;
        context.fillStyle = paints[state];
        context.fillRect(x + from, y, wide, size - gap);
        from += wide;
      });
    });
    return (x, y) => {
      const place = Math.floor(y / size) * columns + Math.floor(x / size);
      return x >= 0 && x < width && place < map.cells.length ? place : null;
    };
  }

  return { line, histogram, quantile, steps, tree, pool };
})();
