//! Requests that a web page of somebody else makes a browser send.
//!
//! A browser on the machine of the server, or inside its network, reaches ports that its user's enemies do not. Two rules
//! keep their pages out. A request that changes something is refused if the browser says that another site sent it. And
//! without an API key the name in `Host` must be one of ours, because a page can have its own name resolve to our
//! address (DNS rebinding) and is then of the same origin as the server.

use std::net::IpAddr;

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, Method, StatusCode, header};

use crate::protocol::ApiError;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Names and origins that requests may have.
pub(crate) struct TrustedSites {
    hosts: Vec<String>,
    origins: Vec<String>,
}

impl TrustedSites {
    /// `hosts` are names besides loopback and addresses; `origins` those that CORS allows. `*` is any.
    pub(crate) fn new(hosts: &[String], origins: &[String]) -> TrustedSites {
        TrustedSites {
            hosts: hosts.iter().map(|name| without_dot(&name.to_ascii_lowercase()).to_owned()).collect(),
            origins: origins.iter().map(|origin| origin.to_ascii_lowercase()).collect(),
        }
    }

    /// Refuses a `Host` that names somebody else. Whoever sends none is no browser.
    pub(crate) fn check_host(&self, request: &Request) -> Result<(), ApiError> {
        let Some(host) = host(request) else { return Ok(()) };
        let name = host_name(host).to_ascii_lowercase();
        let name = without_dot(&name);
        if name.is_empty() {
            let message = "the header Host is empty, expected the name or address of this server";
            return Err(ApiError::new(StatusCode::FORBIDDEN, message).with_code("host_not_allowed"));
        }
        let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().is_ok();
        let loopback = name == "localhost" || name.ends_with(".localhost");
        if address || loopback || self.hosts.iter().any(|known| known == "*" || known == name) {
            return Ok(());
        }
        let name: String = name.chars().take(100).collect();
        let message = format!(
            "this server is not called {name:?}; start it with --allowed-hosts {name}, or with a key"
        );
        Err(ApiError::new(StatusCode::FORBIDDEN, message).with_code("host_not_allowed"))
    }

    /// Refuses what a page of another site has sent and CORS does not allow.
    pub(crate) fn check_origin(&self, request: &Request) -> Result<(), ApiError> {
        let text = |headers: &HeaderMap, name: HeaderName| {
            headers.get(name).map(|value| value.to_str().unwrap_or("?").to_ascii_lowercase())
        };
        let origin = text(request.headers(), header::ORIGIN);
        if let Some(origin) = &origin
            && self.origins.iter().any(|known| known == "*" || known == origin)
        {
            return Ok(());
        }
        let site = text(request.headers(), SEC_FETCH_SITE);
        let foreign = match (&origin, site.as_deref()) {
            (_, Some("same-origin" | "none")) => false,
            (_, Some(_)) => true,
            (Some(origin), None) => !is_own_origin(origin, host(request)),
            (None, None) => false,
        };
        if !foreign {
            return Ok(());
        }
        let message = "a page of another site sent this request; --cors-allow-origin names pages that may";
        Err(ApiError::new(StatusCode::FORBIDDEN, message).with_code("cross_site"))
    }
}

/// Whether a request may change something. Browsers send GET and HEAD for whatever a page names.
pub(crate) fn changes_something(method: &Method, path: &str) -> bool {
    !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS) || path == "/flush_cache"
}

/// The host and port that the client believes to talk to.
fn host(request: &Request) -> Option<&str> {
    let header = request.headers().get(header::HOST).map(|value| value.to_str().unwrap_or("?"));
    header.or_else(|| request.uri().authority().map(|authority| authority.as_str()))
}

/// A name without the dot with which its full form ends.
fn without_dot(name: &str) -> &str {
    name.strip_suffix('.').unwrap_or(name)
}

/// A host without its port.
fn host_name(host: &str) -> &str {
    match host.rsplit_once(':') {
        // The colons of an IPv6 address are inside brackets.
        Some((name, port)) if !port.ends_with(']') => name,
        _ => host,
    }
}

/// Whether an origin such as `http://localhost:30000` is the server itself.
fn is_own_origin(origin: &str, host: Option<&str>) -> bool {
    let without_scheme = origin.split_once("://").map(|(_, rest)| rest);
    without_scheme.is_some() && without_scheme == host.map(str::to_ascii_lowercase).as_deref()
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn request(headers: &[(&str, &str)]) -> Request {
        let mut builder = Request::builder().method(Method::POST).uri("/abort_request");
        for (name, value) in headers {
            builder = builder.header(*name, *value);
        }
        builder.body(Body::empty()).unwrap()
    }

    #[test]
    fn only_own_names_and_addresses_are_hosts() {
        let sites = TrustedSites::new(&["Oscar.example".to_owned(), "full.example.".to_owned()], &[]);
        let ok = |host: &str| sites.check_host(&request(&[("host", host)])).is_ok();
        for good in [
            "localhost",
            "LOCALHOST:30000",
            "chat.localhost:1",
            "127.0.0.1:30000",
            "10.1.2.3",
            "[::1]:30000",
            "[::1]",
            "oscar.example:80",
            "localhost.",
            "localhost.:30000",
            "oscar.example.:80",
            "full.example",
            "full.example.:80",
        ] {
            assert!(ok(good), "{good}");
        }
        for bad in [
            "evil.example",
            "localhost.evil.example:30000",
            "127.0.0.1.evil.example",
            "",
            ".",
            ":30000",
            "localhost..",
            "oscar.example.evil",
        ] {
            assert!(!ok(bad), "{bad}");
        }
        assert!(sites.check_host(&request(&[])).is_ok());
        let empty = sites.check_host(&request(&[("host", "")])).unwrap_err().to_string();
        assert!(empty.contains("empty") && !empty.contains("--allowed-hosts"), "{empty}");
        assert!(
            TrustedSites::new(&["*".to_owned()], &[])
                .check_host(&request(&[("host", "evil.example")]))
                .is_ok()
        );
    }

    #[test]
    fn pages_of_other_sites_are_refused_unless_cors_allows_them() {
        let sites = TrustedSites::new(&[], &["https://chat.example".to_owned()]);
        let ok = |headers: &[(&str, &str)]| sites.check_origin(&request(headers)).is_ok();
        assert!(ok(&[]) && ok(&[("host", "localhost:30000")]));
        assert!(ok(&[("host", "localhost:30000"), ("origin", "http://localhost:30000")]));
        assert!(ok(&[("origin", "https://chat.example"), ("sec-fetch-site", "cross-site")]));
        assert!(ok(&[("sec-fetch-site", "same-origin"), ("origin", "https://proxied.example")]));
        assert!(ok(&[("sec-fetch-site", "none")]));
        for bad in [
            &[("host", "localhost:30000"), ("origin", "http://localhost:3000")][..],
            &[("host", "localhost:30000"), ("origin", "http://evil.example")],
            &[("origin", "null")],
            &[("sec-fetch-site", "cross-site")],
            &[("sec-fetch-site", "same-site"), ("origin", "http://localhost:3000")],
        ] {
            assert!(!ok(bad), "{bad:?}");
        }
    }

    #[test]
    fn reading_is_told_from_changing() {
        assert!(
            !changes_something(&Method::GET, "/v1/models") && changes_something(&Method::GET, "/flush_cache")
        );
        assert!(
            changes_something(&Method::POST, "/generate") && changes_something(&Method::PUT, "/generate")
        );
    }
}
