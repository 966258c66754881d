//! Who says what in a chat: roles that the template knows, and results that follow the calls they are of.

use std::collections::HashSet;

use oscar_model::text::ChatTemplate;
use serde_json::Value;

use crate::protocol::ApiError;

/// The roles of OpenAI's interface. A template may know others.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Refuses roles that neither the interface nor the template has.
pub(super) fn check_roles(messages: &[Value], template: &ChatTemplate) -> Result<(), ApiError> {
    for (index, message) in messages.iter().enumerate() {
        let role = message["role"].as_str().unwrap_or_default();
        if !ROLES.contains(&role) && !names_role(template.source(), role) {
            let role: String = role.chars().take(40).collect();
            let field = format!("messages[{index}].role");
            let message = format!("{field} is {role:?}, expected one of {}", ROLES.join(", "));
            return Err(ApiError::bad_field(field, message));
        }
    }
    Ok(())
}

/// Whether a template compares the role of a message with this one: `message['role'] == 'ipython'`, `role in ['a', 'b']`.
fn names_role(template: &str, role: &str) -> bool {
    let compared = |before: &str| {
        let begin = before.rfind("{%").unwrap_or(0);
        let before = before[begin..].trim_end();
        match before.strip_suffix("==").or_else(|| before.strip_suffix("!=")) {
            Some(left) => left.trim_end().trim_end_matches(['\'', '"', ']', ')']).ends_with("role"),
            // In a list that the role is looked for in; `x['role']` is no list.
            None => before.rfind(" in ").is_some_and(|at| {
                let (left, list) = (before[..at].trim_end(), before[at + 4..].trim_start());
                list.starts_with(['[', '(']) && !list.contains([']', ')']) && left.contains("role")
            }),
        }
    };
    ['\'', '"'].iter().any(|quote| {
        let quoted = format!("{quote}{role}{quote}");
        template.match_indices(&quoted).any(|(at, _)| compared(&template[..at]))
    })
}

/// Gives results the role that they have today where they have their old one, which few templates know.
pub(super) fn rename_function_results(messages: &mut [Value], template: &ChatTemplate) {
    for message in messages.iter_mut().filter(|message| message["role"] == "function") {
        if !names_role(template.source(), "function") {
            message["role"] = "tool".into();
        }
    }
}

/// Refuses results of tools that were not called before.
pub(super) fn check_results(messages: &[Value]) -> Result<(), ApiError> {
    let mut called = false;
    let mut ids: HashSet<&str> = HashSet::new();
    for (index, message) in messages.iter().enumerate() {
        for call in message.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
            called = true;
            ids.extend(call.get("id").and_then(Value::as_str));
        }
        if message["role"] != "tool" {
            continue;
        }
        if !called {
            let field = format!("messages[{index}]");
            let message = format!("{field} is the result of a tool, and no message before it calls one");
            return Err(ApiError::bad_field(field, message));
        }
        // Not every client gives its calls ids.
        let id = message.get("tool_call_id").and_then(Value::as_str).filter(|_| !ids.is_empty());
        if let Some(id) = id.filter(|id| !ids.contains(id)) {
            let id: String = id.chars().take(80).collect();
            let field = format!("messages[{index}].tool_call_id");
            let message = format!("{field} is {id:?}, and no call before it has this id");
            return Err(ApiError::bad_field(field, message));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn param(refused: Result<(), ApiError>) -> Value {
        refused.unwrap_err().body()["error"]["param"].clone()
    }

    #[test]
    fn roles_are_those_of_the_interface_and_of_the_template() {
        let template =
            ChatTemplate::from_source("{% if messages[0].role == 'ipython' %}{% endif %}").unwrap();
        let said = |role: &str| [json!({"role": "user"}), json!({"role": role})];
        for role in ["system", "developer", "user", "assistant", "tool", "ipython"] {
            assert_eq!(check_roles(&said(role), &template), Ok(()));
        }
        for role in ["wizard", "Assistant", "messages", "python"] {
            assert_eq!(param(check_roles(&said(role), &template)), "messages[1].role");
        }
    }

    #[test]
    fn old_results_are_results_of_tools_unless_the_template_knows_them() {
        let renamed = |template: &str| {
            let mut messages = [json!({"role": "function", "name": "f", "content": "3"})];
            rename_function_results(&mut messages, &ChatTemplate::from_source(template).unwrap());
            messages[0]["role"].clone()
        };
        assert_eq!(renamed("{{ messages }}"), "tool");
        assert_eq!(renamed("{% if messages[0].role == 'function' %}{% endif %}"), "function");
    }

    #[test]
    fn results_follow_their_calls() {
        let call =
            |id: Value| json!({"role": "assistant", "tool_calls": [{"id": id, "function": {"name": "f"}}]});
        let result = |id: Value| json!({"role": "tool", "tool_call_id": id, "content": "3"});
        let user = json!({"role": "user", "content": "hi"});
        for good in [
            vec![user.clone(), call("a".into()), result("a".into()), result(Value::Null)],
            vec![call(Value::Null), result("a".into())],
            vec![call("a".into()), result("a".into()), user.clone(), call("b".into()), result("b".into())],
        ] {
            assert_eq!(check_results(&good), Ok(()));
        }
        assert_eq!(param(check_results(&[user.clone(), result("a".into())])), "messages[1]");
        assert_eq!(param(check_results(&[result("a".into()), call("a".into())])), "messages[0]");
        assert_eq!(param(check_results(&[call("a".into()), result("b".into())])), "messages[1].tool_call_id");
        let empty = json!({"role": "assistant", "content": "x", "tool_calls": []});
        assert_eq!(param(check_results(&[empty, result("a".into())])), "messages[1]");
    }

    #[test]
    fn a_role_is_one_that_the_template_compares_with() {
        let template = "{% for m in messages %}{% if m['role'] == 'ipython' or m.role != \"critic\" %}\
            {{ m['role'] + m['content'] }}{% elif m[\"role\"] in ['judge', 'jury'] %}{{ '<|im_end|>' }}{% endif %}\
            {% if m['content'] == 'nothing' %}{% endif %}{% endfor %}";
        for role in ["ipython", "critic", "judge", "jury"] {
            assert!(names_role(template, role), "{role}");
        }
        for word in ["role", "content", "<|im_end|>", "nothing", "wizard", ""] {
            assert!(!names_role(template, word), "{word}");
        }
    }
}
