//! What a page is called in L3: a chained BLAKE3 hash over an injective encoding.
//!
//! ```text
//! seed   = H(version, identity, namespace)                 one per subtree
//! link 0 = H(seed,     tokens of page 0)                   the token chain
//! link i = H(link i-1, tokens of page i)
//! key    = H(link i, component)                            one per component and page
//! ```

use crate::interface::{ComponentSpec, Namespace};

/// A page's name, or a link of the token chain.
pub type Key = [u8; 32];

const FORMAT_VERSION: &str = "1";

fn encode(out: &mut Vec<u8>, tag: u8, raw: &[u8]) {
    out.push(tag);
    out.extend_from_slice(&(raw.len() as u64).to_le_bytes());
    out.extend_from_slice(raw);
}

/// The digest a namespace's token chain starts from.
pub fn namespace_seed(identity: &[u8], namespace: &Namespace) -> Key {
    let mut parts = Vec::new();
    encode(&mut parts, b's', b"hicache");
    encode(&mut parts, b'i', FORMAT_VERSION.as_bytes());
    encode(&mut parts, b'b', identity);
    for part in [&namespace.salt, &namespace.lora, &namespace.extra] {
        match part {
            None => parts.push(b'n'),
            Some(text) => encode(&mut parts, b's', text),
        }
    }
    blake3::hash(&parts).into()
}

/// Chain the pages of `tokens` onto `previous`; one link a page.
pub fn chain_links(mut previous: Key, tokens: &[i32], page_size: usize, links: &mut Vec<Key>) {
    let mut raw = vec![0; 32 + 4 * page_size];
    for page in tokens.chunks_exact(page_size) {
        raw[..32].copy_from_slice(&previous);
        for (bytes, token) in raw[32..].chunks_exact_mut(4).zip(page) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        previous = blake3::hash(&raw).into();
        links.push(previous);
    }
}

/// Turns links into the page keys of one component.
#[derive(Debug, Clone)]
pub struct ComponentKeys {
    suffix: Vec<u8>,
}

impl ComponentKeys {
    /// The keys of a component.
    pub fn new(spec: &ComponentSpec) -> Self {
        let mut suffix = Vec::new();
        encode(&mut suffix, b's', b"component");
        encode(&mut suffix, b's', spec.name.as_bytes());
        encode(&mut suffix, b's', spec.rule.name().as_bytes());
        for number in [spec.num_layers, spec.bytes_per_token, spec.state_bytes] {
            encode(&mut suffix, b'i', number.to_string().as_bytes());
        }
        Self { suffix }
    }

    /// The key of one page.
    pub fn key(&self, link: &Key) -> Key {
        let mut hasher = blake3::Hasher::new();
        hasher.update(link);
        hasher.update(&self.suffix);
        hasher.finalize().into()
    }

    /// The keys of several pages.
    pub fn keys(&self, links: &[Key]) -> Vec<Key> {
        links.iter().map(|link| self.key(link)).collect()
    }
}
