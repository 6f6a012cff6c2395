/* The inner loops of one kind of gates, at one level of vector instructions: the kind's header
 * includes this last. Gates and tokens are computed where the recurrence takes them, so that they
 * pass through no memory; the recurrence waits for its last step meanwhile. */

INLINE Given KIND(fetch_given)(Steps *s, int option, int resets) {
    Given given = {.option = option};
    for (int n = 0; n < KIND(INPUTS); n++) given.input[n] = LEVEL(next)(&s->input[n]);
    for (int n = 0; n < KIND(PARAMETERS); n++)
        given.parameter[n] = LEVEL(load)(s->parameters + n * LANES);
    if (resets) {
        given.reset = (Ints){0} - (*s->reset.at != 0);
        s->reset.at += s->reset.pitch;
    }
    return given;
}

/* state = states[t] = gate * state + token */
INLINE void KIND(forward_steps)(Steps s, int option, int resets) {
    Floats h = LEVEL(load)(s.state);
    for (int64_t t = 0; t < s.steps; t++) {
        const Given given = KIND(fetch_given)(&s, option, resets);
        const Step step = KIND(step)(KIND(values)(&given));
        h = step.gate * h + step.token;
        if (resets) h = LEVEL(select)(given.reset, step.token, h);
        LEVEL(put_next)(&s.states, h);
    }
    LEVEL(store)(s.state, h);
}

/* adjoint = gate * adjoint + states_grad[t], the gate being that of the step before. The gate is
 * carried, rather than the product: a step then rounds the same wherever pieces of time end. */
INLINE void KIND(backward_steps)(Steps s, int option, int resets) {
    const Floats zero = {0};
    Floats a = LEVEL(load)(s.state), gate = LEVEL(load)(s.gate), sum[MOST_PARAMETERS] = {zero};
    for (int64_t t = 0; t < s.steps; t++) {
        const Given given = KIND(fetch_given)(&s, option, resets);
        const KIND(Values) values = KIND(values)(&given);
        a = gate * a + LEVEL(next)(&s.states_grad);
        Floats gate_grad = a * LEVEL(next)(&s.states);
        if (resets) gate_grad = LEVEL(select)(given.reset, zero, gate_grad);
        const Gradients to = KIND(gradients)(&given, &values, gate_grad, a);
        for (int n = 0; n < KIND(INPUTS); n++) LEVEL(put_next)(&s.grad[n], to.input[n]);
        for (int n = 0; n < KIND(PARAMETERS); n++) sum[n] += to.parameter[n];
        gate = KIND(step)(values).gate;
        if (resets) gate = LEVEL(select)(given.reset, zero, gate);
        if (resets) a = LEVEL(select)(given.reset, zero, a);
    }
    LEVEL(store)(s.state, a);
    LEVEL(store)(s.gate, gate);
    for (int n = 0; n < KIND(PARAMETERS); n++)
        LEVEL(store)(s.sums + n * LANES, LEVEL(load)(s.sums + n * LANES) + sum[n]);
}

#define STEPS_FUNCTION(name)                                           \
    TARGET static void KIND(name)(const Steps *steps, int option) {    \
        const int resets = steps->reset.at != NULL;                    \
        if (KIND(OPTIONS) && option && resets)                         \
            KIND(name##_steps)(*steps, 1, 1);                          \
        else if (KIND(OPTIONS) && option)                              \
            KIND(name##_steps)(*steps, 1, 0);                          \
        else if (resets)                                               \
            KIND(name##_steps)(*steps, 0, 1);                          \
        else                                                           \
            KIND(name##_steps)(*steps, 0, 0);                          \
    }
STEPS_FUNCTION(forward)
STEPS_FUNCTION(backward)
#undef STEPS_FUNCTION
#undef KIND
