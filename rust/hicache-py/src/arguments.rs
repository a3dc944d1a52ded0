//! What comes in from Python.

use std::collections::BTreeMap;
use std::sync::Arc;

use hicache_radix::interface::{
    Answers, ComponentSpec, Eviction, Namespace, Rating, Regard, ReuseRule, Tier, TreeConfig, WritePolicy,
    MOST_WORTH,
};
use numpy::{PyArray1, PyArrayMethods, PyReadonlyArray1, PyUntypedArrayMethods};
use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyString};

use crate::errors;
use crate::ordering::PyOrdering;
use crate::records::breathe;
use crate::span_rule::PySpanRule;

/// What is said of turns: of each the lease, its worth, and a `hicache.types.Regard` or its number.
pub fn ratings(leases: &[i64], worths: &[i64], regards: Option<Vec<i64>>) -> PyResult<Vec<Rating>> {
    let regards = regards.unwrap_or_else(|| vec![Regard::Plain as i64; leases.len()]);
    let (most, lens) = (i64::from(MOST_WORTH), (leases.len(), worths.len(), regards.len()));
    if lens.0 != lens.1 || lens.0 != lens.2 {
        let found = format!("{} leases, {} worths and {} regards", lens.0, lens.1, lens.2);
        return Err(PyValueError::new_err(found));
    }
    if let Some(wrong) = worths.iter().find(|worth| !(0..=most).contains(*worth)) {
        return Err(PyValueError::new_err(format!("worth: {wrong} is not within 0 to {most}")));
    }
    let rated = leases.iter().zip(worths).zip(regards).map(|((lease, worth), number)| {
        let regard = Regard::ALL.into_iter().find(|known| *known as i64 == number);
        let regard =
            regard.ok_or_else(|| PyValueError::new_err(format!("{number} is not a valid Regard")))?;
        Ok(Rating { lease: *lease as u64, worth: *worth as u32, regard })
    });
    rated.collect()
}

/// More tokens than this are refused: positions are 32 bits wide.
const MAX_TOKENS: usize = i32::MAX as usize;

/// Token ids as they lie in the caller's array.
///
/// *Caller guarantees* (Python): no other thread writes to the array during the call.
pub enum Tokens<'py> {
    Narrow(PyReadonlyArray1<'py, i32>),
    Wide(PyReadonlyArray1<'py, i64>),
}

/// Run the work on the tokens as a slice, of whichever type.
macro_rules! with_tokens {
    ($array:expr, |$tokens:ident| $work:expr) => {
        match &$array {
            $crate::arguments::Tokens::Narrow(array) => {
                let $tokens = array.as_slice()?;
                $work
            }
            $crate::arguments::Tokens::Wide(array) => {
                let $tokens = array.as_slice()?;
                $work
            }
        }
    };
}
pub(crate) use with_tokens;

/// Check the form of a token array; `hicache.radix.keys.token_buffer` has the rules and the words.
pub fn tokens<'py>(given: &Bound<'py, PyAny>) -> PyResult<Tokens<'py>> {
    if let Some(tokens) = readable(given)? {
        return Ok(tokens);
    }
    static TOKEN_BUFFER: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let check = TOKEN_BUFFER.import(given.py(), "hicache.radix.keys", "token_buffer")?;
    let array = check.call1((given,))?;
    readable(&array)?.ok_or_else(|| PyValueError::new_err(format!("tokens cannot be read: {array:.80}")))
}

/// The tokens, if they are such an array. (`carray`: contiguous, aligned and writeable.)
fn readable<'py>(given: &Bound<'py, PyAny>) -> PyResult<Option<Tokens<'py>>> {
    let tokens = if let Ok(array) = given.cast::<PyArray1<i32>>() {
        Tokens::Narrow(array.try_readonly()?)
    } else if let Ok(array) = given.cast::<PyArray1<i64>>() {
        Tokens::Wide(array.try_readonly()?)
    } else {
        return Ok(None);
    };
    let flags = given.getattr(intern!(given.py(), "flags"))?;
    if !flags.getattr(intern!(given.py(), "carray"))?.is_truthy()? {
        return Ok(None);
    }
    if tokens.len() > MAX_TOKENS {
        return Err(PyValueError::new_err(format!("more than {MAX_TOKENS} tokens")));
    }
    Ok(Some(tokens))
}

impl Tokens<'_> {
    pub fn len(&self) -> usize {
        match self {
            Self::Narrow(array) => array.len(),
            Self::Wide(array) => array.len(),
        }
    }
}

/// A lease's or a ticket's number. What no core can have given out is refused as unknown.
pub fn number(what: &str, value: &Bound<'_, PyAny>) -> PyResult<i64> {
    whole(value, |value| format!("{what} {value} is unknown"))
}

/// A whole number. `refusal` says what is wrong with one that does not fit.
pub fn whole(value: &Bound<'_, PyAny>, refusal: impl FnOnce(&Bound<'_, PyAny>) -> String) -> PyResult<i64> {
    value.extract().map_err(|error: PyErr| {
        if error.is_instance_of::<PyOverflowError>(value.py()) {
            errors::protocol(value.py(), refusal(value))
        } else {
            error
        }
    })
}

/// How many tokens the caller has compared already.
pub fn verified_len(value: Option<&Bound<'_, PyAny>>, num_tokens: usize) -> PyResult<i64> {
    let Some(value) = value else { return Ok(0) };
    whole(value, |value| format!("{value} tokens are said to be verified, got {num_tokens}"))
}

/// A request's priority; the default where none is given. `check_priority` has the limits and the words.
pub fn priority(py: Python<'_>, value: Option<&Bound<'_, PyAny>>) -> PyResult<u32> {
    static DEFAULT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    static CHECK: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    match value {
        None => DEFAULT.import(py, "hicache.types", "DEFAULT_PRIORITY")?.extract(),
        Some(value) => {
            CHECK.import(py, "hicache.radix.check", "check_priority")?.call1((value,))?;
            value.extract()
        }
    }
}

/// A tier by its number.
pub fn tier(value: &Bound<'_, PyAny>) -> PyResult<Tier> {
    let number: usize = value.extract()?;
    let found = Tier::ALL.get(number).copied();
    found.ok_or_else(|| errors::protocol(value.py(), format!("{number} is not a tier")))
}

/// UTF-8 with surrogates let through, as `hicache.radix.keys.encode_parts` has it.
fn text(value: &Bound<'_, PyAny>) -> PyResult<Option<Vec<u8>>> {
    if value.is_none() {
        return Ok(None);
    }
    let text = value.cast::<PyString>()?;
    if let Ok(plain) = text.to_cow() {
        return Ok(Some(plain.as_bytes().to_vec()));
    }
    let raw = text.call_method1("encode", ("utf-8", "surrogatepass"))?;
    Ok(Some(raw.cast::<PyBytes>()?.as_bytes().to_vec()))
}

/// A namespace; none is the default one.
pub fn namespace(value: Option<&Bound<'_, PyAny>>) -> PyResult<Namespace> {
    let Some(value) = value else { return Ok(Namespace::default()) };
    let part = |name| text(&value.getattr(name)?);
    Ok(Namespace { salt: part("salt")?, lora: part("lora")?, extra: part("extra")? })
}

/// An L3 probe's answer: a mapping of component to a mapping of page index to presence.
pub fn answers(found: &Bound<'_, PyAny>, names: &[String]) -> PyResult<Answers> {
    let py = found.py();
    let mut answers: Answers = vec![BTreeMap::new(); names.len()];
    let mut unknown: Vec<String> = Vec::new();
    let found = as_dict(found)?;
    for (name, pages) in found.iter() {
        let name: String = name.extract()?;
        let Some(at) = names.iter().position(|known| *known == name) else {
            unknown.push(name);
            continue;
        };
        for (position, item) in pages.call_method0("items")?.try_iter()?.enumerate() {
            breathe(py, position);
            let (index, is_there): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item?.extract()?;
            let Ok(index) = index.extract::<usize>() else {
                return Err(errors::protocol(py, format!("{index} is not a page index")));
            };
            answers[at].insert(index, is_there.is_truthy()?);
        }
    }
    if !unknown.is_empty() {
        unknown.sort();
        return Err(errors::protocol(py, format!("no component is called {}", unknown.join(", "))));
    }
    Ok(answers)
}

fn as_dict<'py>(mapping: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
    match mapping.cast::<PyDict>() {
        Ok(dict) => Ok(dict.clone()),
        Err(_) => Ok(mapping.py().get_type::<PyDict>().call1((mapping,))?.cast_into::<PyDict>()?),
    }
}

/// A `hicache.radix.interface.TreeConfig` that `check_config` has passed.
pub fn config(config: &Bound<'_, PyAny>) -> PyResult<TreeConfig> {
    let py = config.py();
    let word = |name: &str| config.getattr(name)?.str()?.extract::<String>();
    let page_size = config.getattr("page_size")?.extract()?;
    let mut components = Vec::new();
    for spec in config.getattr("components")?.try_iter()? {
        components.push(component(&spec?, page_size)?);
    }
    let slots = |name: &str| -> PyResult<Vec<usize>> {
        let given = as_dict(&config.getattr(name)?)?;
        components
            .iter()
            .map(|spec| given.get_item(&spec.name)?.map_or(Ok(0), |count| count.extract()))
            .collect()
    };
    let (device_slots, host_slots) = (slots("device_slots")?, slots("host_slots")?);
    let (device_costs, host_costs) = (slots("device_costs")?, slots("host_costs")?);
    let eviction = match word("eviction")?.as_str() {
        "lru" => Eviction::Lru,
        "lfu" => Eviction::Lfu,
        "fifo" => Eviction::Fifo,
        "mru" => Eviction::Mru,
        "filo" => Eviction::Filo,
        "slru" => Eviction::Slru,
        "priority" => Eviction::Priority,
        "tlru" => Eviction::Tlru,
        "session" => Eviction::Session,
        "adaptive" => Eviction::Adaptive,
        custom => Eviction::Custom(Arc::new(PyOrdering::new(py, custom)?)),
    };
    let write = match word("write")?.as_str() {
        "write_back" => WritePolicy::WriteBack,
        "write_through_selective" => WritePolicy::WriteThroughSelective,
        _ => WritePolicy::WriteThrough,
    };
    Ok(TreeConfig {
        page_size,
        components,
        device_slots,
        host_slots,
        host_units: config.getattr("host_units")?.extract()?,
        host_costs,
        device_units: config.getattr("device_units")?.extract()?,
        device_costs,
        has_store: config.getattr("has_store")?.extract()?,
        max_stored_pages: config.getattr("max_stored_pages")?.extract()?,
        write,
        pauses_writes: config.getattr("pauses_writes")?.extract()?,
        admits_by_rank: config.getattr("admission")?.extract::<String>()? == "ranked",
        declines_over: config.getattr("store_admission")?.extract::<String>()? == "unless_over",
        eviction,
        by_leaf: word("granularity")? == "leaf",
        tail_tokens: config.getattr("tail_tokens")?.extract()?,
        mark_spacing: config.getattr("mark_spacing")?.extract()?,
        identity: config.getattr("identity")?.extract()?,
        emit_events: config.getattr("emit_events")?.extract()?,
    })
}

fn component(spec: &Bound<'_, PyAny>, page_size: usize) -> PyResult<ComponentSpec> {
    let name: String = spec.getattr("name")?.extract()?;
    let rule = match spec.getattr("rule")?.str()?.extract::<String>()?.as_str() {
        "path" => ReuseRule::Path,
        "window" => ReuseRule::Window,
        "checkpoint" => ReuseRule::Checkpoint,
        _ => ReuseRule::Custom(Arc::new(PySpanRule::new(spec, page_size)?)),
    };
    let window: i64 = spec.getattr("window_tokens")?.extract()?;
    Ok(ComponentSpec {
        name,
        rule,
        window_tokens: usize::try_from(window).unwrap_or(0),
        num_layers: spec.getattr("num_layers")?.extract()?,
        bytes_per_token: spec.getattr("bytes_per_token")?.extract()?,
        state_bytes: spec.getattr("state_bytes")?.extract()?,
    })
}
