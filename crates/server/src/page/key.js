// The API key: asked for when the server wants one, kept in this tab and nowhere else.

const STORE = "oscar-key";
const dialog = document.getElementById("key-dialog");
const field = document.getElementById("api-key");
const notice = document.getElementById("key-notice");
const opener = document.getElementById("key-open");

let key = "";
try {
  key = sessionStorage.getItem(STORE) ?? "";
} catch {
  // A browser that keeps nothing asks again.
}

/** The key to send; empty when there is none. */
export function apiKey() {
  return key;
}

/** Asks for the key; whoever closes the dialogue finds it again behind a button. */
export function askForKey() {
  notice.textContent = key ? "The server refused this key." : "This server asks for an API key.";
  opener.hidden = false;
  if (!dialog.open) dialog.showModal();
  field.value = key;
  field.select();
}

/** Calls back when another key was entered. */
export function whenKeyChanges(callback) {
  document.getElementById("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    key = field.value.trim();
    field.value = "";
    try {
      sessionStorage.setItem(STORE, key);
    } catch {
      // It is used all the same.
    }
    dialog.close();
    callback();
  });
}

function change() {
  askForKey();
  notice.textContent = "Enter another key for this server.";
}

opener.hidden = !key;
opener.addEventListener("click", change);
document.getElementById("key-cancel").addEventListener("click", () => dialog.close());
