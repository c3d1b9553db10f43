// Redraws the curves of operators; the page defines dcnetFormulas from the classes of magnitudes and angles.
const dcnetOperators = (() => {
  const { magnitudes, angles } = dcnetFormulas;
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
      // The curve of a component without a formula does not change.
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
