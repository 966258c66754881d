// Settings of the page, kept in this tab and nowhere else, and the panels beside the conversation.

const STORE = "oscar-settings";
const form = document.getElementById("settings-form");
const panels = ["settings", "cache"];
/** Room for the panels beside the conversation, as in the style sheet. */
const wide = matchMedia("(min-width: 56.01rem)");
/** Fields of a request that are numbers. */
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

/** The value of a field. */
export function setting(name) {
  return form.elements[name].value;
}

/** Fields for a request; what is left empty is for the server to choose. */
export function wishes() {
  const fields = {};
  if (setting("model")) fields.model = setting("model");
  for (const name of NUMBERS) {
    if (setting(name) !== "") fields[name] = Number(setting(name));
  }
  return fields;
}

/** Whether all fields make sense; those that do not are shown. */
export function areGood() {
  if (form.checkValidity()) return true;
  open("settings", true);
  return form.reportValidity();
}

/** Lists the models to choose from. */
export function listModels(models) {
  const list = form.elements.model;
  const chosen = list.value || stored().model;
  list.replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  if (models.some((model) => model.id === chosen)) list.value = chosen;
  document.getElementById("model-name").textContent = list.value;
}

/** Opens or closes a panel. */
function open(panel, shown) {
  document.getElementById(panel).hidden = !shown;
  document.getElementById(`${panel}-toggle`).setAttribute("aria-expanded", String(shown));
  // On a narrow page there is room for one.
  if (shown && !wide.matches) for (const other of panels) if (other !== panel) open(other, false);
}

function stored() {
  try {
    return JSON.parse(sessionStorage.getItem(STORE)) ?? {};
  } catch {
    return {};
  }
}

function store() {
  const fields = Object.fromEntries(new FormData(form));
  document.getElementById("model-name").textContent = setting("model");
  try {
    sessionStorage.setItem(STORE, JSON.stringify(fields));
  } catch {
    // A browser that keeps nothing still chats.
  }
}

for (const [name, value] of Object.entries(stored())) {
  if (name !== "model" && form.elements[name]) form.elements[name].value = value;
}
form.addEventListener("change", store);
form.addEventListener("submit", (event) => event.preventDefault());
for (const panel of panels) {
  document.getElementById(`${panel}-toggle`).addEventListener("click", () => {
    open(panel, document.getElementById(panel).hidden);
  });
}

open("cache", wide.matches);
