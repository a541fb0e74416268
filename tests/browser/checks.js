// What the open notebook shows, checked. Each function returns complaints, of which a right notebook has none.
window.checks = (() => {
  const CONTRAST = 4;  // WCAG asks for 4.5 of text on one background; one grey that must be readable on two reaches 4.3 on both
  const SLACK = 1.5;   // pixels that rounding may take

  const notebook = () => window.jupyterapp.shell.currentWidget.content.node;
  const all = (selector, within = notebook()) => [...within.querySelectorAll(selector)];
  const figures = () => all(".js-plotly-plot");
  const short = text => { const t = text.trim().replace(/\s+/g, " "); return t.length > 60 ? t.slice(0, 57) + "..." : t; };
  const shown = e => {
    const r = e.getBoundingClientRect();
    return r.width > 0 && r.height > 0 && e.checkVisibility({visibilityProperty: true, opacityProperty: true});
  };

  // "cell 7: ", by the number that Jupyter prints beside the cell
  const where = e => `cell ${e.closest(".jp-Cell")?.querySelector(".jp-InputPrompt")?.textContent.replace(/\D/g, "") || "?"}: `;

  // The part of the window in which the notebook lies
  const frame = () => {
    const e = notebook().querySelector(".jp-WindowedPanel-outer") ?? notebook(), left = e.getBoundingClientRect().left + e.clientLeft;
    return {left, right: left + e.clientWidth};
  };

  const errors = () => window.jupyterapp.shell.currentWidget.content.widgets.filter(c => c.model.type === "code").flatMap(c =>
    c.model.outputs.toJSON().filter(o => o.output_type === "error").map(o => `cell ${c.model.executionCount}: ${o.ename}: ${short(o.evalue)}`));

  // Outputs that came as text because what should show them did not
  const texts = () => all(".jp-OutputArea-output").filter(e =>
    e.querySelector("pre") && !e.querySelector(".jupyter-widgets") &&
    /^\s*(\[(figure|explorer)\]|Figure\(\{|\w+\(((children|value|description)=|\)$))|(Error displaying|Loading) widget/.test(e.textContent)
  ).map(e => where(e) + "text where a figure or a widget should be: " + short(e.textContent));

  // What an explorer says of an exception; of a MxdebugError it says what was expected, which is an answer
  const raised = () => all(".mxdebug-says").filter(e => /^\s*!/.test(e.textContent) && !/\n  expected  /.test(e.textContent))
    .map(e => where(e) + "an explorer raised " + short(e.textContent));

  const undrawn = () => [
    ...figures().filter(f => !all(".main-svg", f).some(shown)).map(f => where(f) + "a figure that is not drawn"),
    ...all("[data-mime-type^='application/vnd.plotly']").filter(e => !e.querySelector(".js-plotly-plot") && !e.matches(".js-plotly-plot"))
      .map(e => where(e) + "a figure that is not drawn"),
    ...all(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.widget-view+json']")
      .filter(e => !all(".jupyter-widgets", e).some(shown)).map(e => where(e) + "a widget that is not there")];

  // Parts of a figure that are meant to be seen, without what a plot area clips, what appears under the mouse, and invisible handles
  const parts = figure => all("text, .legend .bg, .infolayer image, .cbfills path, .axislines path", figure)
    .filter(e => shown(e) && !e.closest(".hoverlayer, .draglayer, defs") && (e.closest(".legend") || !e.closest("[clip-path]")));

  const cut = () => {
    const out = [], f = frame();
    for (const figure of figures()) {
      const box = figure.getBoundingClientRect();
      if (box.right > f.right + SLACK || box.left < f.left - SLACK)
        out.push(where(figure) + `a figure ${Math.round(box.width)} px wide leaves the notebook`);
      // Places inside the cell that the figure, or what it draws, runs out of: it is cut off there, or must be scrolled to
      const right = Math.max(...all(".main-svg", figure).filter(shown).map(e => e.getBoundingClientRect().right));
      for (let e = figure; e && !e.matches(".jp-Cell"); e = e.parentElement)
        if (right > e.getBoundingClientRect().left + e.clientLeft + e.clientWidth + SLACK) {
          out.push(where(figure) + "a figure is wider than its place");
          break;
        }
      for (const part of parts(figure)) {
        const r = part.getBoundingClientRect();
        if (r.left < box.left - SLACK || r.right > box.right + SLACK || r.top < box.top - SLACK || r.bottom > box.bottom + SLACK)
          out.push(where(figure) + `beyond its figure: ${short(part.textContent) || part.getAttribute("class") || part.tagName}`);
      }
    }
    for (const widget of all(".jupyter-widgets").filter(shown)) {
      const r = widget.getBoundingClientRect();
      if (r.right > f.right + SLACK) out.push(where(widget) + `a widget leaves the notebook: ${short(widget.textContent)}`);
    }
    // Long lines of text scroll on their own; the controls and the figure must not move with them.
    for (const explorer of all(".mxdebug-explorer"))
      if (explorer.scrollWidth > explorer.clientWidth + SLACK)
        out.push(where(explorer) + `an explorer scrolls sideways, by ${explorer.scrollWidth - explorer.clientWidth} px`);
    return out;
  };

  // Two texts of a figure, one over the other
  const crowded = () => figures().flatMap(figure => {
    const texts = parts(figure).filter(e => e.tagName === "text" && e.textContent.trim());
    const rects = texts.map(e => e.getBoundingClientRect());
    const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > SLACK
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
    const out = [];
    for (let i = 0; i < texts.length; i++)
      for (let j = 0; j < i; j++)
        if (over(rects[i], rects[j]))
          out.push(where(figure) + `one over the other: "${short(texts[j].textContent)}", "${short(texts[i].textContent)}"`);
    return out;
  });

  // -- contrast

  const rgba = colour => {
    const n = (colour.match(/[\d.]+/g) ?? []).map(Number);
    return n.length < 3 || !/^rgb/.test(colour) ? null : [n[0], n[1], n[2], n[3] ?? 1];
  };
  const over = (top, below) => [0, 1, 2].map(i => top[3] * top[i] + (1 - top[3]) * below[i]);
  const luminance = c => c.map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => { const [x, y] = [luminance(a), luminance(b)]; return (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05); };
  const opacity = e => e && e !== document.body ? Number(getComputedStyle(e).opacity) * opacity(e.parentElement) : 1;

  const pageBehind = e => {
    const layers = [];
    for (; e && layers.at(-1)?.[3] !== 1; e = e.parentElement) {
      const c = rgba(getComputedStyle(e).backgroundColor);
      if (c?.[3]) layers.push(c);
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };

  // What lies behind a text of a figure: the shapes painted before it that hold its centre.
  // null: a picture, whose colour there is not known.
  const figureBehind = (text, figure) => {
    const r = text.getBoundingClientRect(), x = (r.left + r.right) / 2, y = (r.top + r.bottom) / 2;
    let behind = pageBehind(figure);
    for (const e of all("rect, path, circle, image", figure)) {
      if (!(e.compareDocumentPosition(text) & Node.DOCUMENT_POSITION_FOLLOWING)) break;
      if (e.closest("defs, .draglayer, .hoverlayer")) continue;
      const b = e.getBoundingClientRect();
      if (x < b.left || x > b.right || y < b.top || y > b.bottom) continue;
      if (e.tagName === "image") { behind = null; continue; }
      const style = getComputedStyle(e), fill = rgba(style.fill);
      if (!fill) continue;
      fill[3] *= Number(style.fillOpacity) * opacity(e);
      if (fill[3] === 1) behind = fill.slice(0, 3); else if (behind && fill[3]) behind = over(fill, behind);
    }
    return behind;
  };

  const unreadable = () => {
    const out = new Set();
    const judge = (e, colour, behind, text) => {
      if (!colour || !behind || /^[■●]$/.test(text.trim())) return;  // the colour of a key, with words beside it
      colour[3] *= opacity(e);
      const c = contrast(over(colour, behind), behind);
      if (c < CONTRAST) out.add(where(e) + `contrast ${c.toFixed(1)}: ${short(text)}`);
    };
    for (const figure of figures())
      for (const text of all("text", figure).filter(e => shown(e) && e.textContent.trim() && !e.closest("defs, .hoverlayer")))
        for (const e of text.querySelector("tspan") ? all("tspan", text).filter(t => !t.querySelector("tspan")) : [text]) {
          const style = getComputedStyle(e), fill = rgba(style.fill);
          if (fill) fill[3] *= Number(style.fillOpacity);
          judge(e, fill, figureBehind(text, figure), e.textContent);
        }
    for (const output of all(".jp-OutputArea-output")) {
      const walk = document.createTreeWalker(output, NodeFilter.SHOW_TEXT);
      while (walk.nextNode()) {
        const e = walk.currentNode.parentElement;
        if (walk.currentNode.data.trim() && !e.closest("svg, style, script, select") && shown(e))
          judge(e, rgba(getComputedStyle(e).color), pageBehind(e), walk.currentNode.data);
      }
    }
    return [...out];
  };

  // Changes as long as anything still moves
  const geometry = () => all(".js-plotly-plot, .js-plotly-plot text, .jupyter-widgets").map(e => {
    const r = e.getBoundingClientRect();
    return [r.left, r.top, r.width, r.height].map(Math.round).join();
  }).join(";");

  // Every figure has the width of its place, and nothing moves from one picture to the next
  const settled = async () => {
    for (let before = null, still = 0, n = 0; still < 3 && n < 100; n++) {
      await new Promise(done => setTimeout(done, 60));
      const now = geometry();
      still = now === before ? still + 1 : 0;
      before = now;
    }
  };

  // What an explorer shows: its text; its text and its picture
  const text = explorer => all(".mxdebug-says", explorer).map(e => e.textContent).join();
  const picture = explorer => text(explorer) + JSON.stringify(all(".js-plotly-plot", explorer).map(f => [f.data, f.layout.title]));

  const focused = new Set();  // what had the keyboard since it was cleared
  document.addEventListener("focusin", e => focused.add(e.target));

  return {errors, texts, raised, undrawn, cut, crowded, unreadable, settled, text, picture, focused};
})();
