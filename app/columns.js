// The columns are drawn anew many times a second. This keeps what a visitor did with them, and tells which step was chosen.
const phone = matchMedia("(max-width: 720px)");
const opened = new Map();

const settle = () => {
  for (const lane of element.querySelectorAll("details")) {
    lane.open = opened.get(lane.dataset.lane) ?? !phone.matches;
  }
};
new MutationObserver(settle).observe(element, { childList: true, subtree: true });
phone.addEventListener("change", settle);

element.addEventListener("click", (event) => {
  const lane = event.target.closest("summary")?.parentElement;
  if (lane) opened.set(lane.dataset.lane, !lane.open);
  const tick = event.target.closest("[data-step]");
  if (tick) trigger("select", { lane: tick.dataset.lane, step: Number(tick.dataset.step) });
});

element.addEventListener("keydown", (event) => {
  const tick = event.target.closest("[data-step]");
  const next = { ArrowLeft: tick?.previousElementSibling, ArrowRight: tick?.nextElementSibling }[event.key];
  if (!next) return;
  event.preventDefault();
  tick.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});
