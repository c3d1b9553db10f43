// Magnitudes and angles as dcnet.magnitude and dcnet.angle have them; a test compares the two.
const dcnetOperators = (() => {
  const tanhOf = (a, b) => Math.tanh(a) / Math.tanh(b);
  const magnitudes = {
    sphere: (n, c) => c.alpha,
    ball: (n, c) => (c.alpha * Math.min(n, c.rho)) / c.rho,
    tanh: (n, c) => c.alpha * Math.tanh(n / c.rho),
    linear: (n, c) => c.alpha * n,
    seg: (n, c) => c.beta * n + (c.alpha - c.beta) * Math.min(n, c.rho),
    log: (n, c) => c.alpha * Math.log1p(n),
    mix: (n, c) => c.alpha * n + c.beta * Math.log1p(n),
  };
  const angles = {
    linear: (t) => 1 - (2 * t) / Math.PI,
    cos: (t) => Math.cos(t),
    sigmoid: (t, c) => tanhOf((Math.PI / 2 - t) / (2 * c.k), Math.PI / (4 * c.k)),
    sqcos: (t) => Math.sign(Math.cos(t)) * Math.cos(t) ** 2,
    relucos: (t) => Math.max(0, Math.cos(t)),
  };
  const points = 121;
  const scale = (text) => {
    const [low, high, start, end] = text.split(" ").map(Number);
    const place = (value) => start + ((value - low) / (high - low)) * (end - start);
    return { low, high, place };
  };
  const draw = (chart, formulas, constants) => {
    const [x, y] = [scale(chart.dataset.x), scale(chart.dataset.y)];
    for (const group of chart.querySelectorAll("[data-part]")) {
      const formula = formulas[group.dataset.part];
      // What no slider moves, and what is learned, stays as it was drawn.
      if (!formula) continue;
      const path = Array.from({ length: points }, (_, i) => {
        const at = x.low + ((x.high - x.low) * i) / (points - 1);
        return `${x.place(at).toFixed(1)} ${y.place(formula(at, constants)).toFixed(1)}`;
      });
      group.querySelector("path").setAttribute("d", `M${path.join("L")}`);
    }
  };
  return { magnitudes, angles, draw };
})();

(() => {
  const box = document.getElementById("operator-curves");
  if (!box) return;
  const sliders = [...box.querySelectorAll("[data-symbol]")];
  const show = () => {
    const constants = {};
    for (const slider of sliders) {
      constants[slider.dataset.symbol] = Number(slider.value);
      slider.parentElement.querySelector("output").textContent = Number(slider.value).toFixed(2);
    }
    dcnetOperators.draw(document.getElementById("chart-magnitudes-chart"), dcnetOperators.magnitudes, constants);
    dcnetOperators.draw(document.getElementById("chart-angles-chart"), dcnetOperators.angles, constants);
  };
  for (const slider of sliders) slider.addEventListener("input", show);
  box.querySelector("[data-reset]").addEventListener("click", () => {
    for (const slider of sliders) slider.value = slider.dataset.start;
    show();
  });
})();
