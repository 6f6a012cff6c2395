// The types of a scan: ELEMENT is that of its tensors, GATE_ELEMENT that of its gates. Both come from the build.
#pragma once
#include "../common/element.cuh"

using Element = ELEMENT;
using GateElement = GATE_ELEMENT;
using Storage = Element::Storage;
using GateStorage = GateElement::Storage;
using State = Element::State;
