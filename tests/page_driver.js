// Injected into the page: moves every control both ways and reports what happened as text.
const faults = [];
addEventListener("error", (event) => faults.push(event.message));
console.error = (...words) => faults.push(words.join(" "));
addEventListener("securitypolicyviolation", (event) => faults.push(event.violatedDirective));
const moved = [], drawn = {};
const charts = () => [...document.querySelectorAll(".chart")];
function set(control, value) {
  if (control.type === "checkbox") control.checked = value;
  else control.value = value;
  control.dispatchEvent(new Event("input", { bubbles: true }));
  control.dispatchEvent(new Event("change", { bubbles: true }));
}
function move(control) {
  const before = document.querySelector("main").innerHTML;
  if (control.tagName === "BUTTON") control.click();
  else if (control.tagName === "SELECT") {
    for (const option of [...control.options].reverse()) set(control, option.value);
  } else if (control.type === "checkbox") { set(control, true); set(control, false); }
  else { const old = control.value; set(control, control.max || 3); set(control, control.min || 0); set(control, old); }
  moved.push(control.id);
  drawn[control.id] = before !== document.querySelector("main").innerHTML;
}
const text = () => document.getElementById("said").textContent;
const outcome = {};
document.getElementById("next").click();
outcome.example = text();
const controls = [...document.querySelectorAll("input, select, button")].map((x) => x.id);
for (const id of controls) move(document.getElementById(id));
document.getElementById("example").click();
document.getElementById("next").focus();
document.getElementById("next").click();
outcome.again = text();
outcome.tabbable = controls.every((id) => !document.getElementById(id) || document.getElementById(id).tabIndex === 0);
outcome.labelled = [...document.querySelectorAll("input, select")].every((x) => x.labels?.length || x.ariaLabel);
outcome.charts = charts().map((x) => [x.id, x.querySelectorAll("svg *").length]);
outcome.notANumber = document.querySelector("main").innerHTML.includes("NaN");
outcome.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
const done = document.createElement("pre");
done.id = "outcome";
done.textContent = JSON.stringify({ ...outcome, faults, moved });
document.body.append(done);
