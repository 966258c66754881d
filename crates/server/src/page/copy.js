// Copying texts to the clipboard.

/** How long a button says that it worked. */
const SAID_MS = 1500;

/** Copies a text and says so on the button that was pressed. */
export async function copyFrom(button, text) {
  const said = (await copy(text)) ? "Copied" : "Not copied";
  const before = button.dataset.label ?? button.textContent;
  button.dataset.label = before;
  button.textContent = said;
  setTimeout(() => {
    if (button.textContent === said) button.textContent = before;
  }, SAID_MS);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

/** The clipboard is closed to pages without TLS, unless they are on this machine. A selection can be copied by all. */
function copyBySelection(text) {
  const box = document.createElement("textarea");
  box.value = text;
  box.className = "unseen";
  const focused = document.activeElement;
  document.body.append(box);
  box.select();
  const copied = document.execCommand("copy");
  box.remove();
  focused?.focus();
  return copied;
}
